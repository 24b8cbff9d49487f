"""Methods with architecture parameters: samplers that also learn how good the ops of each layer are, by gradients or counts."""
