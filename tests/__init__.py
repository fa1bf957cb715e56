"""Tests of the project; they mirror its folders."""
