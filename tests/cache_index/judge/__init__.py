"""A judge of the index: what KV events mean, from the wire's description and the design alone.

Nothing here imports the implementation, and no rule was taken from its code. An engine is
modelled with what it holds; its publisher and the network are data; the verdict says, at each
moment, how many tokens of a prompt may be claimed and how many must be. The readings taken where
the description leaves room, always on the side of under-reporting:

* The truth is what the engine has *said*: events leave only with a step, so a cleared engine that
  does no step is, for any listener, not cleared.
* A claim may exceed the truth only by blocks that were true within one trust lease plus the time
  a message may be under way (`TRANSIT_S`).
* AllBlocksCleared names no tier. A listener may take the host tier as gone; it may keep it only
  if the engine kept it.
* Stores and removals are counted: two copies of one hash need two removals. An engine that
  reports reused blocks again (`reports_again`) adds no copy by that. Nothing on the wire tells such
  a report from a second copy unless new blocks follow on it in the same batch, so one that nothing
  follows may be counted as a copy, until another report of the same first block that new blocks
  follow shows what it was. This is the one reading that is not on the side of
  under-reporting: the other, that the first removal is always the last, would forget every real
  second copy.
* A placeholder (a host store without tokens) says where its block is only if the block was known
  then; a listener may ignore any other.
* Pools announce salted blocks under the unsalted hash, without extra keys and group. From a source
  with salted blocks a listener may ignore host stores that name no group.
* A store whose parent is not held anywhere is an orphan: it need not be claimed. A parent that is
  stored later in the same batch is known.
* A window group must hold the whole window before the end of the match. A listener may count the
  window with or without the token that is computed next.
* An adapter without a name on the wire (before 0.14) need not be claimed, and must never be
  claimed for the base model.
* A listener that says exact may take `WORK_S` over what it heard last.
* A batch that only the network damaged need not be asked for again.
* A hybrid engine that computes a block stores it in every group that keeps it, also where one of
  them had it: else a listener that joins late could not know that there are several groups. (A
  group with a higher number, or a removal that names another one, tells; group 0 alone looks the
  same as that of a plain model.)
* Of a hybrid model a second copy that new blocks follow may be taken for a report of reuse: it need
  not be called exact.
* Of a hybrid model, of which a part was never heard, it need not trust anything.
* A source whose trust is `none` claims nothing.
"""
