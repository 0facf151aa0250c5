//! Memory files that become shorter while they are mapped.

use std::os::fd::{AsFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitStatus};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use hostmem::{Lost, ShrinkWatch, WatchError};

use super::*;

const LEN: u64 = 16 * PAGE;

/// A memory file that can be made shorter, of `2^huge_log2` bytes a page if given.
fn file(len: u64, huge_log2: Option<u32>) -> File {
    let huge = huge_log2.map_or(0, |log2| libc::MFD_HUGETLB | (log2 << 26));
    // SAFETY: the name is a C string; what is returned is new, or no descriptor.
    let file = unsafe {
        let fd = libc::memfd_create(c"shrinking".as_ptr(), libc::MFD_CLOEXEC | huge);
        assert!(fd >= 0);
        File::from(OwnedFd::from_raw_fd(fd))
    };
    file.set_len(len).unwrap();
    file
}

/// All of `file` as foreign memory; `None` if it cannot be mapped.
fn shared(file: &File, len: u64) -> Option<Arc<Mapping>> {
    use std::os::fd::AsRawFd as _;
    struct Unmaps(usize, usize);
    impl Drop for Unmaps {
        fn drop(&mut self) {
            // SAFETY: it is not used any more.
            unsafe { libc::munmap(self.0 as *mut libc::c_void, self.1) };
        }
    }
    let len = len as usize;
    let (access, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_SHARED | libc::MAP_NORESERVE,
    );
    // SAFETY: the kernel chooses a free address.
    let start = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            access,
            flags,
            file.as_raw_fd(),
            0,
        )
    };
    if start == libc::MAP_FAILED {
        return None;
    }
    let owner = Arc::new(Unmaps(start as usize, len));
    let start = NonNull::new(start.cast()).unwrap();
    let file = file.as_fd().try_clone_to_owned().unwrap();
    // SAFETY: mapped until the owner is dropped, and accessed as cells only.
    let mapping = unsafe { Mapping::foreign(owner, start, len as u64, Some((file, 0))) };
    Some(Arc::new(mapping.unwrap()))
}

fn watched(file: &File) -> (Arc<Mapping>, ShrinkWatch) {
    ShrinkWatch::install().unwrap();
    let mapping = shared(file, LEN).unwrap();
    let watch = ShrinkWatch::new(mapping.clone()).unwrap().unwrap();
    (mapping, watch)
}

fn read(mapping: &Mapping, at: u64) -> u64 {
    mapping.cells()[at as usize / 8].load(Ordering::Relaxed)
}

fn write(mapping: &Mapping, at: u64, value: u64) {
    mapping.cells()[at as usize / 8].store(value, Ordering::Relaxed);
}

#[test]
fn what_a_file_has_lost_is_zeros_and_reported_and_the_rest_stays() {
    let file = file(LEN, None);
    let (mapping, watch) = watched(&file);
    mapping
        .cells()
        .iter()
        .for_each(|cell| cell.store(1, Ordering::Relaxed));
    let shrunk = true;
    file.set_len(6 * PAGE).unwrap();
    assert_eq!((read(&mapping, 5 * PAGE), watch.lost()), (1, None));
    assert_eq!(read(&mapping, 10 * PAGE + 8), 0);
    let offset = 10 * PAGE;
    assert_eq!(watch.lost(), Some(Lost { offset, shrunk }));
    // Memory like any other from there on, also if the file is longer again.
    write(&mapping, 12 * PAGE, 7);
    file.set_len(LEN).unwrap();
    assert_eq!(
        (read(&mapping, 12 * PAGE), read(&mapping, 10 * PAGE)),
        (7, 0)
    );
    file.set_len(6 * PAGE).unwrap();
    // Below it.
    write(&mapping, 6 * PAGE, 9);
    let offset = 6 * PAGE;
    assert_eq!(watch.lost(), Some(Lost { offset, shrunk }));
    assert_eq!((read(&mapping, 6 * PAGE), read(&mapping, 7 * PAGE)), (9, 0));
    assert_eq!(read(&mapping, 6 * PAGE - 8), 1);
    // Many threads at once, and a new watch of the same memory.
    file.set_len(0).unwrap();
    std::thread::scope(|scope| {
        for n in 0..6 {
            let mapping = &mapping;
            scope.spawn(move || assert_eq!(read(mapping, n * PAGE), 0));
        }
    });
    let offset = 0;
    assert_eq!(watch.lost(), Some(Lost { offset, shrunk }));
}

/// As many mappings as a process may have (`vm.max_map_count`) are soon made of single pages.
#[test]
fn pages_that_are_lost_one_by_one_do_not_cut_the_mapping_into_many() {
    const PAGES: u64 = 200;
    let file = file(PAGES * PAGE, None);
    ShrinkWatch::install().unwrap();
    let mapping = shared(&file, PAGES * PAGE).unwrap();
    let watch = ShrinkWatch::new(mapping.clone()).unwrap().unwrap();
    file.set_len(0).unwrap();
    for page in (0..PAGES).rev().step_by(2) {
        assert_eq!(read(&mapping, page * PAGE), 0);
        assert_eq!(watch.lost().unwrap().offset, page * PAGE);
    }
    let inside = mapping.address()..mapping.address() + mapping.len();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let starts = maps.lines().filter_map(|line| line.split_once('-'));
    let starts = starts.map(|(start, _)| u64::from_str_radix(start, 16).unwrap());
    assert_eq!(starts.filter(|start| inside.contains(start)).count(), 2);
}

#[test]
fn a_huge_page_for_which_there_is_no_room_is_distinguished() {
    let _turn = turn();
    const HUGE: u64 = 2 << 20;
    let free = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
    match std::fs::read_to_string(free) {
        Ok(free) if free.trim() == "0" => {}
        free => return eprintln!("not run: free huge pages: {free:?}"),
    }
    let file = file(3 * HUGE, Some(21));
    let Some(mapping) = shared(&file, 3 * HUGE) else {
        return eprintln!("not run: huge pages cannot be mapped without reserving them");
    };
    ShrinkWatch::install().unwrap();
    let watch = ShrinkWatch::new(mapping.clone()).unwrap().unwrap();
    assert_eq!(read(&mapping, HUGE + PAGE), 0);
    let (offset, shrunk) = (HUGE, false);
    assert_eq!(watch.lost(), Some(Lost { offset, shrunk }));
}

#[test]
fn what_cannot_shrink_is_not_watched_and_so_many_are() {
    ShrinkWatch::install().unwrap();
    for backing in [Backing::Anon4K, Backing::Memfd] {
        let mapping = Mapping::new(backing, LEN, None).unwrap();
        assert!(ShrinkWatch::new(Arc::new(mapping)).unwrap().is_none());
    }
    let (mapping, first) = watched(&file(LEN, None));
    let mut all = Vec::new();
    let refused = loop {
        match ShrinkWatch::new(mapping.clone()) {
            Ok(watch) => all.push(watch),
            Err(refused) => break refused,
        }
    };
    assert_eq!(refused, WatchError::TooMany { most: 1024 });
    drop(first);
    assert!(ShrinkWatch::new(mapping).unwrap().is_some());
    assert!(all.len() > 1000);
}

/// Name of the work of the child of the tests below.
const CHILD: &str = "HOSTMEM_SHRINKING";

fn child(what: &str) -> ExitStatus {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "shrinking::a_child", "--ignored"]);
    let done = child.env(CHILD, what).output().unwrap();
    assert!(!String::from_utf8_lossy(&done.stdout).contains(" 0 passed"));
    done.status
}

static ADDRESS: AtomicUsize = AtomicUsize::new(0);

extern "C" fn leaves(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel gives the address of the fault; `_exit` may be called here.
    unsafe {
        let same = (*info).si_addr() as usize == ADDRESS.load(Ordering::Relaxed);
        libc::_exit(if same { 42 } else { 43 });
    }
}

extern "C" fn leaves_too(_: libc::c_int) {
    // SAFETY: it may be called here.
    unsafe { libc::_exit(44) };
}

fn before(action: usize, flags: libc::c_int) {
    // SAFETY: a handler of the type that the flags say, or none.
    unsafe {
        let mut told: libc::sigaction = std::mem::zeroed();
        (told.sa_sigaction, told.sa_flags) = (action, flags);
        libc::sigaction(libc::SIGBUS, &raw const told, std::ptr::null_mut());
        // No core is left behind.
        let none = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        libc::setrlimit(libc::RLIMIT_CORE, &raw const none);
    }
}

#[test]
#[ignore = "the child of others"]
fn a_child() {
    let what = std::env::var(CHILD).unwrap();
    let (handler, fault) = what.split_once(' ').unwrap();
    match handler {
        "default" => before(libc::SIG_DFL, 0),
        "ignored" => before(libc::SIG_IGN, 0),
        "handled" => before(leaves as *const () as usize, libc::SA_SIGINFO),
        "handled-plainly" => before(leaves_too as *const () as usize, 0),
        _ => {}
    }
    let (mine, other) = (file(LEN, None), file(LEN, None));
    let (mapping, watch) = watched(&mine);
    let elsewhere = shared(&other, LEN).unwrap();
    for file in [&mine, &other] {
        file.set_len(0).unwrap();
    }
    match fault {
        "elsewhere" => {
            assert_eq!(read(&mapping, PAGE), 0);
            ADDRESS.store((elsewhere.address() + PAGE) as usize, Ordering::Relaxed);
            read(&elsewhere, PAGE);
        }
        "afterwards" => {
            drop(watch);
            read(&mapping, PAGE);
        }
        // SAFETY: a signal to this thread.
        "sent" => unsafe {
            libc::raise(libc::SIGBUS);
        },
        fault => panic!("{fault}"),
    }
}

#[test]
fn a_fault_that_is_not_watched_ends_the_process_as_before() {
    for (what, signal, code) in [
        ("runtime elsewhere", Some(libc::SIGBUS), None),
        ("runtime afterwards", Some(libc::SIGBUS), None),
        ("default elsewhere", Some(libc::SIGBUS), None),
        ("default afterwards", Some(libc::SIGBUS), None),
        ("default sent", Some(libc::SIGBUS), None),
        ("ignored elsewhere", Some(libc::SIGBUS), None),
        ("ignored sent", None, Some(0)),
        ("handled elsewhere", None, Some(42)),
        ("handled sent", None, Some(43)),
        ("handled-plainly afterwards", None, Some(44)),
    ] {
        let status = child(what);
        assert_eq!((status.signal(), status.code()), (signal, code), "{what}");
    }
}
