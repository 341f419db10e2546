#include "base/fail.h"
#include "store/etcd/store.h"

namespace tessera::store {

std::unique_ptr<Store> open_etcd(std::string_view url, const StoreOptions&) {
  fail(ErrorCode::kUnimplemented,
       "store {}: this release has no etcd client; run `tessera store` and use tcp://"_message, url);
}

}  // namespace tessera::store
