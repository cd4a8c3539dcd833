"""A policy in the terms of other frameworks: to their own objects, from them, and what they cannot honour."""
