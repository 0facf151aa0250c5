//! A client that others wrote: that of rust-vmm's `vfio_user`.

use std::os::fd::AsRawFd as _;

use dmaspace_vfio_user::ClientLimits;
use vfio_user::Client;

use crate::client::{Bench, PAGE, contents, memory_file};
use crate::engine::STORE;

#[test]
fn the_client_of_rust_vmm_is_served() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = Client::new(bench.path()).unwrap();
    let regions: Vec<_> = [0, 2, 7].map(|n| client.region(n).unwrap().size).to_vec();
    assert_eq!(regions, [32, 1 << 20, 256]);
    let irqs = client.get_irq_info(2).unwrap();
    assert_eq!((irqs.index, irqs.count), (2, 4));
    // Its `resettable` is the opposite of the flag (0.1.7), so it is not looked at.
    client.reset().unwrap();
    let file = memory_file(4 * PAGE);
    let fd = file.as_raw_fd();
    client.dma_map(PAGE, 0x8000, 2 * PAGE, fd).unwrap();
    client.region_write(2, 0, b"by rust-vmm").unwrap();
    for (at, value) in [(0, 0x8ffe_u64), (8, 11), (16, STORE)] {
        client.region_write(0, at, &value.to_le_bytes()).unwrap();
    }
    assert_eq!(contents(&file, 2 * PAGE - 2, 11), b"by rust-vmm");
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    // `DATA_EVENTFD`, `ACTION_TRIGGER`.
    client
        .set_irqs(2, 0b10_0100, 0, 1, &[event.as_raw_fd()])
        .unwrap();
    client.region_write(0, 16, &STORE.to_le_bytes()).unwrap();
    let mut raised = [0; 8];
    rustix::io::read(&event, &mut raised).unwrap();
    assert_eq!(u64::from_ne_bytes(raised), 1);
    client.dma_unmap(0x8000, 2 * PAGE).unwrap();
    assert_eq!(bench.memory.counts().files, 0);
    drop(client);
    let served = bench.end().remove(0);
    assert_eq!((served.maps, served.unmaps, served.refused), (1, 1, 0));
}
