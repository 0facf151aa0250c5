//! Address spaces over memory of this process.

use std::ffi::{c_int, c_void};
use std::ptr;

use dmaspace::hostmem::{Backing, Mapping};
use dmaspace_capi::*;

use crate::{Callbacks, config, done, flush, said};

pub(crate) const IOVA: u64 = 1 << 32;
pub(crate) const PAGE: u64 = 4096;
pub(crate) const RW: u32 = DMASPACE_READ | DMASPACE_WRITE;

/// # Safety
///
/// `context` is that of a [`Callbacks`].
unsafe extern "C" fn attach(context: *mut c_void, device: u32, root: *const Root) -> c_int {
    // SAFETY: the caller's promise, and the library's.
    let (told, root) = unsafe { (&mut *context.cast::<Callbacks>(), *root) };
    assert!(root.address != 0 && root.levels == 4);
    told.devices.push(device);
    told.answer
}

/// # Safety
///
/// As for [`attach`].
unsafe extern "C" fn detach(context: *mut c_void, device: u32) -> c_int {
    // SAFETY: the caller's promise.
    let told = unsafe { &mut *context.cast::<Callbacks>() };
    told.devices.retain(|there| *there != device);
    told.answer
}

/// An address space with memory of four pages, and who is told.
pub(crate) struct Rig {
    told: *mut Callbacks,
    pub(crate) space: *mut Space,
    pub(crate) memory: *mut Memory,
    _mapping: Mapping,
}

impl Rig {
    pub(crate) fn new() -> Self {
        let mapping = Mapping::new(Backing::Memfd, 4 * PAGE, None).unwrap();
        let told = Box::into_raw(Box::new(Callbacks::default()));
        let unit = Unit {
            context: told.cast(),
            attach: Some(attach),
            detach: Some(detach),
            flush: Some(flush),
        };
        let (mut space, mut memory) = (ptr::null_mut(), ptr::null_mut());
        let start = ptr::with_exposed_provenance_mut(mapping.address() as usize);
        let fd = std::os::fd::AsRawFd::as_raw_fd(&mapping.fd().unwrap());
        // SAFETY: the mapping stays until the end, and is used by nobody else.
        unsafe {
            let config = config(c"vtd-ss");
            done(dmaspace_space_new(
                &raw const config,
                ptr::null(),
                &raw const unit,
                &raw mut space,
            ));
            done(dmaspace_memory_new(start, 4 * PAGE, fd, 0, &raw mut memory));
        }
        Self {
            told,
            space,
            memory,
            _mapping: mapping,
        }
    }

    pub(crate) fn map(&self, iova: u64, offset: u64, len: u64, prot: u32) -> Status {
        // SAFETY: the handles are there.
        unsafe { dmaspace_space_map(self.space, iova, self.memory, offset, len, prot) }
    }

    pub(crate) fn unmap(&self, iova: u64, len: u64) -> (Status, u64) {
        let mut unpinned = u64::MAX;
        // SAFETY: the handle is there.
        let status = unsafe { dmaspace_space_unmap(self.space, iova, len, &raw mut unpinned) };
        (status, unpinned)
    }

    pub(crate) fn info(&self) -> SpaceInfo {
        let mut info = SpaceInfo::default();
        // SAFETY: the handle is there.
        done(unsafe { dmaspace_space_get_info(self.space, &raw mut info) });
        info
    }

    pub(crate) fn charged(&self) -> u64 {
        let mut bytes = 0;
        // SAFETY: the handle is there.
        done(unsafe { dmaspace_memory_charged(self.memory, &raw mut bytes) });
        bytes
    }

    /// Everything is given back.
    pub(crate) fn end(self) {
        // SAFETY: nobody uses them any more.
        unsafe {
            done(dmaspace_space_destroy(self.space));
            done(dmaspace_memory_destroy(self.memory));
            drop(Box::from_raw(self.told));
        }
    }

    fn answer(&self, answer: c_int) {
        // SAFETY: no callback is under way.
        unsafe { (*self.told).answer = answer }
    }
}

#[test]
fn memory_is_pinned_and_charged_for_as_long_as_it_is_mapped() {
    let rig = Rig::new();
    done(rig.map(IOVA, 0, 4 * PAGE, RW));
    done(rig.map(2 * IOVA, PAGE, PAGE, DMASPACE_READ));
    assert_eq!(
        rig.charged(),
        4 * PAGE,
        "once, though a part is mapped twice"
    );
    assert_eq!(rig.info().areas, 2);
    let mut leaf = Leaf::default();
    // SAFETY: the handles are there, and the rest is lent for the calls.
    unsafe {
        done(dmaspace_space_attach(rig.space, 0x28));
        assert_eq!((*rig.told).devices, [0x28]);
        assert_eq!(
            dmaspace_space_attach(rig.space, 0x28),
            Status::Device,
            "{}",
            said()
        );
        done(dmaspace_space_translate(
            rig.space,
            2 * IOVA + 1,
            &raw mut leaf,
        ));
        assert_eq!((leaf.run.iova, leaf.prot), (2 * IOVA, DMASPACE_READ));
        let none = dmaspace_space_translate(rig.space, IOVA - 1, &raw mut leaf);
        assert_eq!(none, Status::NotMapped);
        assert_eq!(dmaspace_memory_destroy(rig.memory), Status::Busy);
        assert_eq!(
            said(),
            "an address space has the memory: 16384 bytes are pinned"
        );
    }
    assert_eq!(rig.unmap(2 * IOVA, PAGE), (Status::Ok, 0));
    assert_eq!(rig.unmap(IOVA, 4 * PAGE), (Status::Ok, 4 * PAGE));
    assert_eq!(rig.charged(), 0);
    // SAFETY: nobody uses them any more.
    unsafe {
        let flushed: u64 = (*rig.told).flushed.iter().map(|range| range.len).sum();
        assert_eq!(flushed, 5 * PAGE);
        done(dmaspace_space_detach(rig.space, 0x28));
        assert_eq!(dmaspace_space_detach(rig.space, 0x28), Status::Device);
        done(dmaspace_memory_destroy(rig.memory));
        done(dmaspace_space_destroy(rig.space));
        drop(Box::from_raw(rig.told));
    }
}

#[test]
fn each_refusal_of_an_address_space_has_its_code() {
    let rig = Rig::new();
    done(rig.map(IOVA, 0, 2 * PAGE, RW));
    assert_eq!(rig.map(IOVA + PAGE, 0, PAGE, RW), Status::Overlap);
    assert_eq!(rig.map(0, 0, 5 * PAGE, RW), Status::Range);
    assert_eq!(rig.map(1, 0, PAGE, RW), Status::Range);
    assert_eq!(rig.map(0, 0, PAGE, 0), Status::Prot);
    assert_eq!(rig.unmap(IOVA, PAGE), (Status::Cuts, u64::MAX));
    assert_eq!(rig.unmap(u64::MAX, 2).0, Status::Range);
    let mut other = ptr::null_mut();
    let start = ptr::without_provenance_mut(4096);
    // SAFETY: refused before anything is accessed.
    unsafe {
        let status = dmaspace_memory_new(start, PAGE + 1, -1, 0, &raw mut other);
        assert_eq!(status, Status::Argument, "{}", said());
        let status = dmaspace_memory_new(ptr::null_mut(), PAGE, -1, 0, &raw mut other);
        assert_eq!((status, said()), (Status::Argument, "start is NULL".into()));
        // No process has so many files.
        let status = dmaspace_memory_new(start, PAGE, c_int::MAX, 0, &raw mut other);
        assert_eq!(status, Status::System, "{}", said());
        // Nothing is mapped there: it cannot be pinned.
        done(dmaspace_memory_new(start, PAGE, -1, 0, &raw mut other));
        let status = dmaspace_space_map(rig.space, 0, other, 0, PAGE, RW);
        assert_eq!(status, Status::Pin, "{}", said());
        done(dmaspace_memory_destroy(other));

        let mut space = ptr::null_mut();
        let unit = Unit {
            context: ptr::null_mut(),
            attach: None,
            detach: None,
            flush: None,
        };
        let config = config(c"vtd-ss");
        let status = dmaspace_space_new(
            &raw const config,
            ptr::null(),
            &raw const unit,
            &raw mut space,
        );
        assert_eq!(
            (status, said()),
            (Status::Argument, "unit->attach is NULL".into())
        );
        let unit = Unit {
            context: ptr::null_mut(),
            attach: Some(attach),
            detach: Some(detach),
            flush: Some(flush),
        };
        let config = crate::config(c"arm-s1-64k");
        let status = dmaspace_space_new(
            &raw const config,
            ptr::null(),
            &raw const unit,
            &raw mut space,
        );
        assert_eq!(status, Status::Format, "{}", said());
        done(dmaspace_space_destroy(rig.space));
        done(dmaspace_memory_destroy(rig.memory));
        drop(Box::from_raw(rig.told));
    }
}

#[test]
fn memory_stays_pinned_until_the_unit_has_forgotten_it() {
    let rig = Rig::new();
    rig.answer(-1);
    // SAFETY: the handle is there.
    let status = unsafe { dmaspace_space_attach(rig.space, 1) };
    assert_eq!(status, Status::Device, "{}", said());
    rig.answer(0);
    // SAFETY: as above.
    done(unsafe { dmaspace_space_attach(rig.space, 2) });
    done(rig.map(IOVA, 0, 4 * PAGE, RW));
    rig.answer(-1);
    assert_eq!(rig.unmap(IOVA, 4 * PAGE).0, Status::Flush);
    assert!(
        said().contains("the answer of the flush callback"),
        "{}",
        said()
    );
    assert_eq!(
        (rig.info().areas, rig.info().retired, rig.charged()),
        (0, 1, 4 * PAGE)
    );
    // SAFETY: the handles are there; at the end nobody uses them any more.
    unsafe {
        assert_eq!(dmaspace_memory_destroy(rig.memory), Status::Busy);
        assert_eq!(dmaspace_space_flush(rig.space), Status::Flush);
        rig.answer(0);
        done(dmaspace_space_flush(rig.space));
        assert_eq!((rig.info().retired, rig.charged()), (0, 0));

        // A device that stays keeps its memory.
        done(rig.map(IOVA, 0, PAGE, RW));
        rig.answer(-1);
        assert_eq!(
            dmaspace_space_destroy(rig.space),
            Status::Device,
            "{}",
            said()
        );
        assert_eq!(dmaspace_memory_destroy(rig.memory), Status::Busy);
    }
    // Its pins are the process's for good, and so is the mapping.
    std::mem::forget(rig);
}
