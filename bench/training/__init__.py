"""Parts of etp_peers.py."""
