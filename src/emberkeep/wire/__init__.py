"""What the clients and the servers of a cluster share: protocol, connection, security."""
