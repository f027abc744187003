"""A pytest plugin that runs apex's tests on a CPU."""

from trainers import stub_apex

stub_apex.install()
