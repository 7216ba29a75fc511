//! The kernels of docs/tutorial/fused.cu, on emulated clusters over real proxies.

mod common;

use common::fused;

#[test]
fn a_product_is_read_where_it_arrives() {
    fused::product(&fused::put_config());
}

#[test]
fn every_token_reaches_its_expert() {
    fused::tokens(&fused::put_config());
}
