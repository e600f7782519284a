"""The mathematics of PPO and its relatives: tensors in, tensors out.

Nothing here knows a model, a rank, a batch object or a config.

```text
masking        sums, means and whitening that never read a masked entry
advantages/    rewards (and values) -> advantages and returns; registry `register_adv_est`
policy_losses/ log-probs and advantages -> loss per token; registry `register_policy_loss`
preference_losses/  log-probs of responses -> loss per pair; registry `register_preference_loss`
mismatch       sampler and trainer differ: importance weights, rejection, measures
value_losses   the critic's loss per token
kl             distance to the reference policy per token, and the controllers of its weight
aggregation    loss per token -> one number, over the counts of the whole mini-batch
token_numbers  random order from a row's key and a position
registry       the tables of losses and estimators by name
binding        a loss or an estimator with its numbers, also on padded blocks
rows           how tokens that lie end to end divide into rows
blocks         padded blocks for users' functions that do not name `rows`
```

Everything per token is flat, [M]: the tokens of B rows end to end, with their `rows`, beside a `response_mask` [M] that is
1 where the policy wrote the token. Zeros of the mask may be anywhere (tool output, whole rows), and what lies under them is
never read: NaN there is harmless.

docs/algorithms/ lists the estimators and losses with their sources, and says when each one breaks.

Import from the modules; this package exports nothing itself.
"""
