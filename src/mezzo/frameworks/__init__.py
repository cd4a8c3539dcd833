"""Convert a policy to and from the objects of other frameworks, and list what they cannot honour."""
