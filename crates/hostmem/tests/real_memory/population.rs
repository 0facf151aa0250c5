//! Many mappings that are brought in at once.

use std::fs;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, FromRawFd};
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use hostmem::{HugeSize, KernelNodes, NodePolicy, Pool, PopulateError, Population};

use super::*;

/// Mappings of every kind that this machine has, small pages first.
fn every_kind(len: u64) -> (Vec<Mapping>, Option<RaisedPool>) {
    let mut backings = vec![Backing::Anon4K, Backing::Memfd, Backing::Thp];
    let pool = match RaisedPool::raise(HugeSize::TwoMiB, len) {
        Ok(pool) => Some(pool),
        Err(error) => {
            eprintln!("not run in part: hugetlb-2m: {error}");
            None
        }
    };
    backings.extend(pool.as_ref().map(|_| Backing::Hugetlb2M));
    let mappings = backings.into_iter();
    let mappings = mappings.map(|backing| Mapping::new(backing, len, None).unwrap());
    (mappings.collect(), pool)
}

/// Bytes that are there.
fn present(mapping: &Mapping) -> Option<u64> {
    let folios = mapping.folios().ok()?;
    Some(folios.huge + folios.small)
}

#[test]
fn every_kind_is_brought_in_at_once_and_progress_sums_up() {
    let _turn = turn();
    let len = 130 * MIB;
    let (mappings, _pool) = every_kind(len);
    for mapping in &mappings {
        mapping.cells()[512].store(7, Ordering::Relaxed);
    }
    let mut population = Population::new(&mappings);
    let total = mappings.len() as u64 * len;
    assert_eq!((population.done(), population.total()), (0, total));
    let mut told = vec![0];
    let result = population.run(&mut |done| {
        told.push(done);
        ControlFlow::Continue(())
    });
    result.unwrap();
    // Two chunks of 64 MiB and one of 2 MiB each, in any order.
    let mut steps: Vec<u64> = told.windows(2).map(|two| two[1] - two[0]).collect();
    steps.sort_unstable();
    let mut expected = vec![2 * MIB; mappings.len()];
    expected.extend(vec![64 * MIB; 2 * mappings.len()]);
    assert_eq!(steps, expected);
    assert_eq!((population.done(), told.last()), (total, Some(&total)));
    for mapping in &mappings {
        let there = present(mapping);
        assert!(there.is_none_or(|bytes| bytes == len), "{there:?}");
        assert_eq!(mapping.cells()[512].load(Ordering::Relaxed), 7);
    }
}

#[test]
fn an_interrupted_population_goes_on_with_what_is_left() {
    let _turn = turn();
    let (mappings, _pool) = every_kind(66 * MIB);
    let mut population = Population::new(&mappings);
    let (mut told, mut runs) = (Vec::new(), 0);
    loop {
        runs += 1;
        let before = population.done();
        let result = population.run(&mut |done| {
            told.push(done);
            ControlFlow::Break(())
        });
        match result {
            Ok(()) => break,
            Err(PopulateError::Interrupted { done }) => {
                assert!(before < done && done < population.total());
                assert_eq!(done, population.done());
                let there: Option<u64> = mappings.iter().map(present).sum();
                assert!(there.is_none_or(|bytes| bytes == done), "{there:?}");
            }
            Err(error) => panic!("{error}"),
        }
    }
    // Told once by each run, of more each time.
    assert!(told.is_sorted() && told.len() == runs, "{told:?}");
    assert_eq!(population.done(), population.total());
}

/// Threads that populate: the processors that each may use.
fn workers() -> Vec<String> {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let populating = tasks.filter_map(|task| {
        let status = fs::read_to_string(task.ok()?.path().join("status")).ok()?;
        let line = |name| {
            status
                .lines()
                .find_map(|line: &str| line.strip_prefix(name))
        };
        let cpus = line("Cpus_allowed_list:")?.trim().to_owned();
        (line("Name:")?.trim() == "populate").then_some(cpus)
    });
    populating.collect()
}

#[test]
fn workers_are_bounded_and_run_on_the_node_of_the_memory() {
    let _turn = turn();
    let near = |node: &u32| !KernelNodes.processors(*node).is_empty();
    let Some(node) = KernelNodes.memory_nodes().into_iter().find(near) else {
        return eprintln!("not run: no node has a processor for this process");
    };
    let cpus = KernelNodes.processors(node);
    let new = |backing| Mapping::new(backing, 256 * MIB, Some(node));
    let (Ok(small), Ok(huge)) = (new(Backing::Memfd), new(Backing::Thp)) else {
        return eprintln!("not run: memory cannot be placed on node {node}");
    };
    let listed = |list: &str| -> Vec<u32> {
        let ranges = list.split(',').map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            first.parse::<u32>().unwrap()..=last.parse().unwrap()
        });
        ranges.flatten().collect()
    };
    let (mut first, began) = (true, Instant::now());
    let mut population = Population::new([&small, &huge]).workers(NonZeroUsize::new(3).unwrap());
    let result = population.run(&mut |_| {
        // Each of them has chunks to take, and is where it should be in a moment.
        while std::mem::take(&mut first) {
            let there = workers();
            let waits = there.len() <= 3 && began.elapsed() < Duration::from_secs(600);
            assert!(waits, "{there:?}, not 3 on {cpus:?}");
            first = there.len() < 3 || there.iter().any(|list| listed(list) != cpus);
            std::thread::yield_now();
        }
        ControlFlow::Continue(())
    });
    result.unwrap();
    for mapping in [&small, &huge] {
        let nodes = mapping.nodes().unwrap();
        assert!(
            nodes == [(Some(node), mapping.len())] || nodes == [(None, mapping.len())],
            "{nodes:?}"
        );
    }
}

/// A mapping of the first `len` bytes of a memory file that may have less.
fn of_file(file: &File, len: u64) -> Mapping {
    struct Mapped(usize, usize);
    impl Drop for Mapped {
        fn drop(&mut self) {
            // SAFETY: it is not used any more.
            unsafe { libc::munmap(self.0 as *mut _, self.1) };
        }
    }
    let (access, size) = (libc::PROT_READ | libc::PROT_WRITE, len as usize);
    let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: the kernel chooses a free address.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), size, access, flags, fd, 0) };
    assert_ne!(
        start,
        libc::MAP_FAILED,
        "{}",
        std::io::Error::last_os_error()
    );
    let owner = Arc::new(Mapped(start as usize, size));
    let fd = file.as_fd().try_clone_to_owned().unwrap();
    // SAFETY: the owner keeps it mapped, and nothing else uses it.
    unsafe {
        Mapping::foreign(
            owner,
            NonNull::new(start.cast()).unwrap(),
            len,
            Some((fd, 0)),
        )
    }
    .unwrap()
}

fn memory_file(len: u64, flags: libc::c_uint) -> File {
    // SAFETY: the name is a C string.
    let fd = unsafe { libc::memfd_create(c"population".as_ptr(), flags) };
    assert!(fd >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: it was just opened.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(len).unwrap();
    file
}

#[test]
fn the_mapping_that_fails_is_named_and_goes_on_when_that_is_put_right() {
    let _turn = turn();
    for workers in [1, 3] {
        let whole = Mapping::new(Backing::Thp, 70 * MIB, None).unwrap();
        // It ends in its second chunk.
        let file = memory_file(70 * MIB, 0);
        let short = of_file(&file, 192 * MIB);
        let workers = NonZeroUsize::new(workers).unwrap();
        let mut population = Population::new([&whole, &short]).workers(workers);
        let before = match population.run(&mut on) {
            Err(PopulateError::Refused {
                mapping, offset, ..
            }) => {
                assert_eq!((mapping, offset), (1, 64 * MIB));
                population.done()
            }
            result => panic!("{result:?}"),
        };
        // The first chunk of it and what came before.
        assert_eq!(before, (70 + 64) * MIB);
        file.set_len(192 * MIB).unwrap();
        let mut told = before;
        let result = population.run(&mut |done| {
            assert!(done > told, "nothing is repeated");
            told = done;
            ControlFlow::Continue(())
        });
        result.unwrap();
        assert_eq!(told, (70 + 192) * MIB);
        for mapping in [&whole, &short] {
            let there = present(mapping);
            assert!(
                there.is_none_or(|bytes| bytes == mapping.len()),
                "{there:?}"
            );
        }
    }
}

#[test]
fn a_pool_that_is_too_small_is_named_with_its_mapping() {
    let _turn = turn();
    let _pool = match RaisedPool::raise(HugeSize::TwoMiB, 4 * MIB) {
        Ok(pool) => pool,
        Err(error) => return eprintln!("not run: {error}"),
    };
    let overcommit = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages";
    if fs::read_to_string(overcommit).unwrap().trim() != "0" {
        return eprintln!("not run: the pool grows by itself");
    }
    let pool = Pool::read(HugeSize::TwoMiB).unwrap();
    let (free, reserved) = (pool.unreserved(), pool.free - pool.unreserved());
    let len = (free + 1) * 2 * MIB;
    // Without a reservation.
    let huge = of_file(
        &memory_file(len, libc::MFD_HUGETLB | libc::MFD_HUGE_2MB),
        len,
    );
    assert_eq!(huge.backing(), Backing::Hugetlb2M);
    let small = Mapping::new(Backing::Anon4K, 4 * MIB, None).unwrap();
    let mut population = Population::new([&small, &huge]).workers(NonZeroUsize::MIN);
    match population.run(&mut on) {
        Err(PopulateError::HugePages {
            mapping,
            size,
            offset,
            free,
            ..
        }) => {
            assert_eq!((mapping, size, free), (1, HugeSize::TwoMiB, reserved));
            // The chunk of the last page.
            assert_eq!(offset, (len - 1) / (64 * MIB) * 64 * MIB);
        }
        result => panic!("{result:?}"),
    }
    // Huge pages come first.
    assert!(present(&small).is_none_or(|bytes| bytes == 0));
}
