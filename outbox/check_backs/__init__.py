"""The check-back: did the transaction of this half message commit?"""
