"""Inside of other people's trainers, which are imported by nobody who does not use them."""
