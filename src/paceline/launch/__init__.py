"""The launching stage: engines start ranks and end them."""
