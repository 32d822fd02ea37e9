"""simulation.auto_scale: number of environments and minibatch by measurement."""
