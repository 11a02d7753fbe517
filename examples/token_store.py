"""Session tokens for a small web service."""

import hashlib
import os
import time


class TokenStore:
    """Keeps session tokens in memory until they expire."""

    def __init__(self, lifetime=3600):
        self.lifetime = lifetime
        self.tokens = {}

    def create(self, user):
        """Create a token for a user."""
        raw = os.urandom(16)
        token = hashlib.sha256(raw).hexdigest()
        self.tokens[token] = (user, time.time())
        return token

    def lookup(self, token):
        """Return the user of a token, or None."""
        entry = self.tokens.get(token)
        if entry is None:
            return None
        user, created = entry
        if time.time() - created > self.lifetime:
            del self.tokens[token]
            return None
        return user

    def revoke(self, token):
        """Forget a token."""
        self.tokens.pop(token, None)

    def renew(self, token):
        """Start the lifetime of a token again."""
        user = self.lookup(token)
        if user is None:
            return False
        self.tokens[token] = (user, time.time())
        return True

    def expire(self):
        """Forget all tokens that are too old."""
        now = time.time()
        for token, (user, created) in list(self.tokens.items()):
            if now - created > self.lifetime:
                del self.tokens[token]

    def count(self):
        """Return the number of tokens."""
        return len(self.tokens)
