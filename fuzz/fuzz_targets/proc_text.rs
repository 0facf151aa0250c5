#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| dmaspace_fuzz::dmaspace::run("proc_text", data));
