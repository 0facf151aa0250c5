//! x86-64.

use super::*;

#[test]
fn x86_permissions_privilege_and_the_upper_half() {
    // The last page of the address space: index 511 everywhere.
    let image = Image::new(&[
        // P, R/W, U/S, A.
        (0x1ff8, 0x2027),
        (0x2ff8, 0x3027),
        (0x3ff8, 0x4027),
        // P, R/W, U/S, A, D, NX.
        (0x4ff8, 0x8000_0000_dead_b067),
        // 2 MiB: PS, P, U/S; bit 12 is PAT.
        (0x3ff0, 0x1_0020_1085),
        // 1 GiB: PS, P, R/W, no U/S.
        (0x2ff0, 0x2_4000_0083),
    ]);
    let x86 = walker(FormatId::X86_64, 0x1000, 4);
    let found = x86.walk(&image, u64::MAX, W, &mut ()).unwrap();
    assert_eq!(found.pa, 0xdead_bfff);
    assert_eq!(
        found.page,
        Run::new(u64::MAX - 0xfff, Span::new(0xdead_b000, 0x1000))
    );
    assert_eq!((found.prot, found.reads), (Prot::RW, 4));
    let found = x86.walk(&image, 0xffff_ffff_ffc1_2345, R, &mut ()).unwrap();
    assert_eq!(
        found.page,
        Run::new(0xffff_ffff_ffc0_0000, Span::new(0x1_0020_0000, 2 << 20))
    );
    assert_eq!(
        (found.pa, found.prot),
        (0x1_0021_2345, Prot::READ | Prot::EXECUTE)
    );
    let gib = 0xffff_ffff_8000_0000;
    let granted = Prot::RW | Prot::EXECUTE | Prot::PRIVILEGED;
    assert_eq!(reason(&x86, &image, gib, R), WalkReason::Denied { granted });
    let privileged = x86.with_privileged_requests(true);
    let found = privileged.walk(&image, gib, W, &mut ()).unwrap();
    assert_eq!(
        (found.page.pa, found.page.len, found.prot),
        (0x2_4000_0000, 1 << 30, granted)
    );

    // Neither half: bit 47 is not repeated, or not in all bits.
    let aperture = Aperture::signed(48);
    for iova in [1 << 47, 0x8000_0000_0000_0000, 0xfffe_ffff_ffff_f000] {
        assert_eq!(
            reason(&x86, &image, iova, R),
            WalkReason::OutsideAperture { aperture }
        );
    }
    assert_eq!(reason(&x86, &image, 0, R), WalkReason::NotPresent);
    // Level 5 sits on top: the same tables below.
    let image = Image::new(&[(0x7ff8, 0x1027), (0x1ff8, 0x2025), (0x2ff8, 0xc000_0087)]);
    let five = walker(FormatId::X86_64, 0x7000, 5);
    let found = five.walk(&image, u64::MAX, R, &mut ()).unwrap();
    assert_eq!((found.pa, found.reads), (0xffff_ffff, 3));
    // The level above withdrew write permission, and no bit 63 anywhere: executable.
    assert_eq!(found.prot, Prot::READ | Prot::EXECUTE);
    let fault = five.walk(&image, u64::MAX, W, &mut ()).unwrap_err();
    assert_eq!(fault.level, 3);
}

#[test]
fn x86_reserved_bits() {
    let walk = |level: usize, word: u64, bits: u32| {
        let mut words = [
            (0x4000, 0x8007),
            (0x3000, 0x4007),
            (0x2000, 0x3007),
            (0x1000, 0x2007),
        ];
        words[level].1 = word;
        let x86 = walker(FormatId::X86_64, 0x1000, 4).with_output_bits(bits);
        x86.walk(&Image::new(&words), 0, R, &mut ())
            .map_err(|fault| fault.reason)
    };
    let reserved = |bits| Err(WalkReason::Reserved { bits });
    assert_eq!(walk(3, 0x2087, 52), reserved(0x80));
    assert_eq!(walk(2, 0x4000_2087, 52), reserved(0x2000));
    assert_eq!(walk(1, 0x30_0087, 52), reserved(0x10_0000));
    for level in 0..4 {
        assert_eq!(
            walk(level, 0x000c_0000_0000_9007, 50),
            reserved(0x000c_0000_0000_0000)
        );
        // 62:52 and 11:9 are software's.
        let word = 0x7ff0_0000_0000_0e07 | [0x8000, 0x4000, 0x3000, 0x2000][level];
        assert_eq!(walk(level, word, 52).unwrap().pa, 0x8000);
    }
    // Nothing is reserved in an entry that is not present.
    assert_eq!(
        walk(2, 0x000f_ffff_ffff_fffe, 40),
        Err(WalkReason::NotPresent)
    );
}
