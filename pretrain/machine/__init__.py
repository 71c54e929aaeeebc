"""What this machine is and can do: devices, cards, memory and time, the micro-batch that fits, the doctor."""
