"""Convert a policy to and from the settings of other frameworks, and list what they cannot honour."""
