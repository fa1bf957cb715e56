"""Errors, files, JSON and measurements that every other folder uses."""
