"""What touches the hardware: the operations of a decoder on one device."""
