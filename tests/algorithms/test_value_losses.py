import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.value_losses import clipped_value_loss


@settings(max_examples=50, deadline=None)
@given(data=st.data(), c=st.sampled_from([0.0, 0.05, 0.5, 10.0]))
def test_value_loss_gradient_and_metric_equal_the_formula(data, c, masks, numbers):
    mask = data.draw(masks)
    new, old, returns = (data.draw(numbers(mask)) for _ in range(3))
    new.requires_grad_()
    loss, metrics = clipped_value_loss(vpreds=new, values=old, returns=returns, response_mask=mask, cliprange_value=c)
    loss.sum().backward()

    expected = {name: torch.zeros_like(old) for name in ("loss", "gradient", "vf_clipfrac")}
    for i, t in mask.nonzero().tolist():
        v, v_old, target = new[i, t].item(), old[i, t].item(), returns[i, t].item()
        near = min(max(v, v_old - c), v_old + c)
        is_clipped = (near - target) ** 2 > (v - target) ** 2
        expected["loss"][i, t] = 0.5 * max((v - target) ** 2, (near - target) ** 2)
        # A clipped prediction is a constant of the parameters: no gradient.
        expected["gradient"][i, t] = 0.0 if is_clipped else v - target
        expected["vf_clipfrac"][i, t] = float(is_clipped)
    actual = {"loss": loss.detach(), "gradient": new.grad, **metrics}
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
