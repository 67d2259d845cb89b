"""The `predictive` eviction policy, which learns how soon text of a kind is used again."""
