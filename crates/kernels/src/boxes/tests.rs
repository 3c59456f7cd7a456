use super::*;

#[test]
fn padded_rows_keep_their_padding() {
    let src: Vec<u8> = (0..2 * 3 * 10).collect();
    let mut dst = vec![0xEE_u8; 2 * 3 * 8];
    let mv = BoxMove {
        extents: [2, 3, 2],
        src_strides: [30, 10, 2],
        dst_strides: [24, 8, 2],
        src: Elem::U16,
        dst: Elem::U16,
    };
    let mut tally = Tally::default();
    // SAFETY: both vectors span the box.
    unsafe { move_box(&mv, src.as_ptr(), dst.as_mut_ptr(), OnOverflow::Error, &mut tally) };
    for line in 0..6 {
        let s = u8::try_from(line * 10).unwrap();
        assert_eq!(dst[line * 8..line * 8 + 8], [s, s + 1, s + 2, s + 3, 0xEE, 0xEE, 0xEE, 0xEE]);
    }
    assert!(tally.is_clean());
}
