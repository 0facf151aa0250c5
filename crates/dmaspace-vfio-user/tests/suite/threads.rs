//! Device models in threads of their own while the client maps and unmaps.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use dmaspace_vfio_user::ClientLimits;
use vm_memory::{Bytes as _, GuestAddress, GuestMemory as _, Permissions};

use crate::client::*;
use crate::engine::STORE;

#[test]
fn after_an_unmap_is_answered_nothing_is_written() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    // Two files, so that one of them is unmapped from the process each time.
    let files = [memory_file(16 * PAGE), memory_file(16 * PAGE)];
    let (done, written) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        for thread in 0..3_u64 {
            let (memory, done, written) = (&bench.memory, &done, &written);
            scope.spawn(move || {
                let bytes = vec![thread as u8 + 1; 6 * PAGE as usize + 3];
                while !done.load(Ordering::Relaxed) {
                    let at = GuestAddress(0x10_0000 + 4093 * thread);
                    if memory.view().write_slice(&bytes, at).is_ok() {
                        written.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        for round in 0..100 {
            let file = &files[round % 2];
            assert_eq!(client.map(file, 0, 0x10_0000, 16 * PAGE), 0);
            let before = written.load(Ordering::Relaxed);
            while written.load(Ordering::Relaxed) < before + 3 {
                thread::yield_now();
            }
            assert_eq!(client.unmap(0x10_0000, 16 * PAGE), 0);
            put(file, 0, &[0; 16 * PAGE as usize]);
            thread::sleep(Duration::from_micros(200));
            let found = contents(file, 0, 16 * PAGE as usize);
            assert!(found.iter().all(|byte| *byte == 0), "round {round}");
        }
        done.store(true, Ordering::Relaxed);
    });
    drop(client);
    bench.end();
}

#[test]
fn an_access_that_does_not_end_is_an_error_and_nothing_is_lost() {
    let limits = ClientLimits {
        wait: Duration::from_millis(100),
        ..ClientLimits::default()
    };
    let bench = Bench::new(1, limits);
    let mut client = bench.client();
    let file = memory_file(16 * PAGE);
    assert_eq!(client.map(&file, 0, 0, 16 * PAGE), 0);
    let view = bench.memory.view();
    let access = view.get_slices(GuestAddress(0), 8, Permissions::Read);
    let access = access.unwrap();
    assert_eq!(client.unmap(0, 16 * PAGE), EBUSY);
    assert!(bench.engine.refusal().contains("still in use"));
    // No other access finds it.
    assert!(!client.dma(STORE, 0, 8));
    bench.engine.fault();
    // Nothing else is mapped there before the flush has succeeded.
    assert_ne!(client.map(&file, 0, 0, PAGE), 0);
    bench.engine.refusal();
    drop(access);
    // The view still holds the file.
    assert_eq!(client.map(&file, 0, 0, PAGE), 0);
    assert_eq!(client.unmap(0, PAGE), EBUSY);
    assert!(bench.engine.refusal().contains("still in use"));
    assert_eq!(bench.memory.counts().maps, 0);
    assert_eq!(bench.memory.counts().files, 1);
    drop(view);
    assert_eq!(client.map(&file, 0, 0, PAGE), 0);
    assert_eq!(client.unmap(0, PAGE), 0);
    assert_eq!(bench.memory.counts().files, 0);
    drop(client);
    bench.end();
}
