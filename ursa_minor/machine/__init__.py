"""The machine: devices, cards, memory and time, the micro-batch that fits, the doctor."""
