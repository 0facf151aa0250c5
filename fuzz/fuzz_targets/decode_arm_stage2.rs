#![no_main]

dmaspace_fuzz::target!(iopt, "decode_arm_stage2");
