"""Two secrets that sign check-backs, as `openssl rand -base64 32` makes them."""

SECRET = "whsec_+J7siaKaiY09DJ1N4lw5z6fl0lOjEn7EfPd8dJywXXo="
OTHER_SECRET = "whsec_+Sc+v8HmS2bf+GC3Z89iKue4Ap9/19KQY2PtzrN+jxA="
