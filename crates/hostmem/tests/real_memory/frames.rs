//! Runs of what is pinned, beside the page map.

use hostmem::{Backing, FrameSource};
use runs::{Joiner, Span};

use super::*;

#[test]
fn runs_are_the_frames_that_the_pagemap_shows_page_by_page() {
    let _turn = turn();
    for backing in Backing::ALL {
        let len = match backing {
            Backing::Hugetlb1G => 1 << 30,
            _ => 16 * MIB,
        };
        let Some(pinner) = pinner(2 * MIB, len) else {
            return;
        };
        let Some(Memory { mapping, _pool }) = memory(backing, len) else {
            continue;
        };
        if !is_real(&mapping) {
            return eprintln!("not run: frames are hidden from this process");
        }
        let pin = pinner.pin(&mapping, Span::new(0, len), &mut on).unwrap();
        let plain = frames_page_by_page(&mapping, Span::new(0, len));
        for batch in [1, 3, 512] {
            let (runs, entries) = runs_of(&pin, Span::new(0, len), FrameSource::Pagemap, batch);
            assert_eq!(pages_of(&runs), plain, "{backing}");
            for pair in runs.windows(2) {
                assert_ne!(
                    pair[0].start + pair[0].len,
                    pair[1].start,
                    "{backing}: not joined"
                );
            }
            let folios = mapping.folios().unwrap_or_default();
            match backing {
                Backing::Thp if folios.huge + folios.small == len => {
                    assert_eq!(entries, folios.huge / (2 * MIB) + folios.small / PAGE);
                }
                Backing::Thp => {}
                _ => assert_eq!(entries, len / backing.page(), "{backing}"),
            }
        }
        // Parts that begin and end inside of a huge page.
        for part in [
            Span::new(PAGE, PAGE),
            Span::new(2 * MIB - PAGE, 2 * PAGE),
            Span::new(3 * PAGE, len - 8 * PAGE),
        ] {
            let (runs, _) = runs_of(&pin, part, FrameSource::Pagemap, 4);
            let (first, end) = (part.start / PAGE, (part.start + part.len) / PAGE);
            assert_eq!(
                pages_of(&runs),
                plain[first as usize..end as usize],
                "{backing} {part}"
            );
        }
    }
}

#[test]
fn a_mapping_of_mixed_page_sizes_yields_the_right_runs() {
    let _turn = turn();
    let len = 8 * MIB;
    let Some(pinner) = pinner(2 * MIB, len) else {
        return;
    };
    let Memory { mapping, .. } = memory(Backing::Thp, len).unwrap();
    // Splits the second huge page into entries of 4 KiB: another protection for one page of it,
    // and back.
    for protection in [libc::PROT_READ, libc::PROT_READ | libc::PROT_WRITE] {
        let address = (mapping.address() + 3 * MIB) as *mut _;
        // SAFETY: one page of the mapping, which nothing writes meanwhile.
        let result = unsafe { libc::mprotect(address, PAGE as usize, protection) };
        assert_eq!(result, 0);
    }
    let folios = match mapping.folios() {
        Ok(folios) if folios.huge > 0 => folios,
        other => return eprintln!("not run: no transparent huge pages here: {other:?}"),
    };
    assert!(folios.small >= 2 * MIB, "{folios:?}");
    let pin = pinner.pin(&mapping, Span::new(0, len), &mut on).unwrap();
    if !is_real(&mapping) {
        return eprintln!("not run: frames are hidden from this process");
    }
    let (runs, entries) = runs_of(&pin, Span::new(0, len), FrameSource::Pagemap, 5);
    assert_eq!(
        pages_of(&runs),
        frames_page_by_page(&mapping, Span::new(0, len))
    );
    assert_eq!(entries, folios.huge / (2 * MIB) + folios.small / PAGE);
}

#[test]
fn pieces_are_the_same_runs_before_they_are_joined() {
    let _turn = turn();
    let len = 16 * MIB;
    for backing in [Backing::Anon4K, Backing::Thp, Backing::Memfd] {
        let Some(pinner) = pinner(2 * MIB, len) else {
            return;
        };
        let Some(Memory { mapping, _pool }) = memory(backing, len) else {
            continue;
        };
        let pin = pinner.pin(&mapping, Span::new(0, len), &mut on).unwrap();
        let source = FrameSource::detect(&mapping);
        let part = Span::new(3 * PAGE, len - 8 * PAGE);
        let (runs, entries) = runs_of(&pin, part, source, 5);
        let mut frames = pin.runs(part, source).unwrap();
        let (mut joiner, mut joined) = (Joiner::new(), Vec::new());
        let mut batch = [Span::default(); 7];
        loop {
            let count = frames.next_pieces(&mut batch).unwrap();
            let pieces = batch[..count].iter();
            joined.extend(pieces.filter_map(|piece| joiner.push(*piece)));
            if count == 0 {
                break;
            }
        }
        joined.extend(joiner.finish());
        assert_eq!(joined, runs, "{backing}");
        assert_eq!(frames.entries_read(), entries, "{backing}");
    }
}
