"""Pictures and sounds: from what a user gives to features on a device, which a decoder takes among its tokens."""
