// The rows of etp_bench. Each function measures some and adds them to the table; it forks the ranks that it needs.
#pragma once

#include "bench/etp/measure.h"

namespace tessera::bench {

void gather_rows(Table& table);       // one weight, plain and decoded; a list of small ones
void fold_rows(Table& table);         // of gradients into an owner's rows
void latency_rows(Table& table);      // what takes time without moving data
void list_rows(Table& table);         // lists against one by one
void overlap_rows(Table& table);      // gathers hidden behind computation
void consumption_rows(Table& table);  // what the runtime adds to a use, and the recorder to that
void count_rows(Table& table);        // bytes on the wire and in memory
void checker_rows(Table& table);      // of recorded schedules

}  // namespace tessera::bench
