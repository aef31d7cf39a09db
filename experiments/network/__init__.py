"""Networks that can be set: an emulated link, and a lab of hosts behind real limited links."""
