"""The state that newcomers download: copied when needed, packed, announced, offered, downloaded, verified, resumed."""
