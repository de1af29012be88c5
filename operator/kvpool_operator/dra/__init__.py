"""The DRA driver: hands composed CXL memory and whole pools to pods, by resource claims."""
