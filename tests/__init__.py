"""Tests of the project; they mirror its folders."""

import pytest

pytest.register_assert_rewrite("tests.support")  # a failed comparison there shows both sides
