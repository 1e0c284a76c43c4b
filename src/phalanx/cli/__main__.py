"""``python -m phalanx.cli`` is the ``phalanx`` command, where that is not on the path."""

from phalanx.cli.app import main

if __name__ == "__main__":
    main()
