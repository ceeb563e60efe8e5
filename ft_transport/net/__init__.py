"""The network side: a server that sends what it is given, and a client that fills the memory it is given. No torch."""
