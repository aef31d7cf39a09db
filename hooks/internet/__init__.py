"""Sites that come and go on the internet: how they find each other, prove who they are, and send each other tensors."""
