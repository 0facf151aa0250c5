#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| dmaspace_fuzz::dmaspace::run("successor", data));
