#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| dmaspace_fuzz::fuzz_bodies::run("decode_riscv", data));
