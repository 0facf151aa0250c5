#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| dmaspace_fuzz::virtio_balloon::run(
    "balloon_sized_runs",
    data
));
