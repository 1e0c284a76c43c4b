"""Groups of ranks: their collectives, where they meet, and how their processes are started and ended.

``group``: what every group offers, and the group of one. ``thread_group``: ranks that are threads of one process.
``process_group``: ranks that are processes, over gloo or NCCL. ``rendezvous``: where processes meet. ``launch``:
starting and ending them. This file imports nothing, so that a process that is being started comes up light.
"""
