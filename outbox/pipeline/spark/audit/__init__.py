"""The audit: was anything lost, at which hop, and which messages exactly?"""
