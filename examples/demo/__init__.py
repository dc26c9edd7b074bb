"""`python -m examples.demo`: a shop with three workers, sold out without a lock and with one."""
