//! A monitor that takes memory away while the balloon's daemon has it mapped: `SIGBUS` for who looks at it.

use std::os::fd::AsRawFd as _;
use std::path::Path;

use vhost::vhost_user::message::VhostUserProtocolFeatures;
use vhost::vhost_user::{Frontend, VhostUserFrontend as _};
use vhost::{VhostBackend as _, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

use crate::killed::{daemon, directory};
use crate::turn;

const BYTES: u64 = 1 << 20;
/// Where it is for the guest, and for a monitor.
const GUEST: u64 = 1 << 30;
const MONITOR: u64 = 1 << 40;
/// Messages by version 1 of the standard, and vhost-user's own features.
const FEATURES: u64 = 1 << 32 | 1 << 30;

/// Connects as a monitor does, with memory and one queue; returns its bell.
fn connect(socket: &Path, memory: &std::fs::File) -> (Frontend, EventFd) {
    let mut front = Frontend::connect(socket, 1).unwrap();
    front.set_owner().unwrap();
    front.get_features().unwrap();
    front.get_protocol_features().unwrap();
    let protocol = VhostUserProtocolFeatures::CONFIG;
    front.set_protocol_features(protocol).unwrap();
    front.set_features(FEATURES).unwrap();
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr: GUEST,
        memory_size: BYTES,
        userspace_addr: MONITOR,
        mmap_offset: 0,
        mmap_handle: memory.as_raw_fd(),
    };
    front.set_mem_table(&[region]).unwrap();
    let ring = VringConfigData {
        queue_max_size: 16,
        queue_size: 16,
        flags: 0,
        desc_table_addr: MONITOR,
        avail_ring_addr: MONITOR + 0x1000,
        used_ring_addr: MONITOR + 0x2000,
        log_addr: None,
    };
    front.set_vring_num(0, 16).unwrap();
    front.set_vring_base(0, 0).unwrap();
    front.set_vring_addr(0, &ring).unwrap();
    let bell = EventFd::new(0).unwrap();
    front.set_vring_kick(0, &bell).unwrap();
    front.set_vring_enable(0, true).unwrap();
    // It has done all of that when it answers.
    front.get_features().unwrap();
    (front, bell)
}

#[test]
fn a_monitor_that_shrinks_its_memory_ends_its_own_session_only() {
    let _turn = turn();
    let (directory, temporary) = (directory(), directory());
    let socket = directory.path().join("balloon");
    let (mut child, mut said) = daemon(&socket, temporary.path());
    said("listening on");
    for _ in 0..2 {
        let memory = tempfile::tempfile_in("/dev/shm").unwrap();
        memory.set_len(BYTES).unwrap();
        let (_front, bell) = connect(&socket, &memory);
        memory.set_len(0).unwrap();
        bell.write(1).unwrap();
        let line = said("disconnected");
        assert!(
            line.contains("the front end has shrunk its memory: region 0x40000000"),
            "{line}"
        );
    }
    assert!(child.try_wait().unwrap().is_none(), "it is still there");
    child.kill().unwrap();
    child.wait().unwrap();
}
