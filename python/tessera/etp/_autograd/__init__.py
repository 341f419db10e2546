"""How operations of a model get whole weights, and autograd their gradients."""
