"""From a batch of responses to a batch of scores: the manager, the rules, reward models, and what runs them safely."""
