package main

// mutants are the deliberate breakages. Each leaves out one rule of the protocol. Rules R1 to R5
// and invariants I1 to I10 are described in docs/claims.md, the other violations in docs/model.md.
var mutants = []mutant{
	// The anchor: a claim belongs to one node group.
	{name: "no anchor: each group has an object for the claim", smoke: true, edits: []edit{
		{"v1alpha1.ObjectName(r.Cluster, r.ID),\n", "v1alpha1.ObjectName(r.Cluster, r.ID+nodeGroup),\n"},
	}},
	{name: "anchor not followed: a repeated call moves the claim", edits: []edit{
		{
			"	case v1alpha1.PhaseEnded, v1alpha1.PhaseReleasing, v1alpha1.PhaseBound:\n		return c, nil\n	case v1alpha1.PhasePending:\n",
			"	case v1alpha1.PhaseEnded, v1alpha1.PhaseReleasing, v1alpha1.PhaseBound, v1alpha1.PhasePending:\n" +
				"		moved := c.DeepCopy()\n" +
				"		moved.Spec.NodeGroup = c.Spec.Candidates[len(c.Spec.Candidates)-1]\n" +
				"		moved.Labels[v1alpha1.NodeGroupLabel] = moved.Spec.NodeGroup\n" +
				"		_ = e.Client.Update(ctx, moved)\n" +
				"		if true {\n			return e.enterOrMoveOn(ctx, moved)\n		}\n",
		},
	}},
	{name: "an ended id is used again", edits: []edit{
		{
			"	if err := ended(c); err != nil {\n		return nil, err\n	}\n	switch",
			"	if err := ended(c); err != nil {\n		_ = e.Client.Delete(ctx, c)\n		return nil, err\n	}\n	switch",
		},
	}},
	{name: "tombstone dropped early", smoke: true, edits: []edit{
		{"kept - t.Clock.Since(c.Status.EndedAt.Time)", "min(kept, time.Second) - t.Clock.Since(c.Status.EndedAt.Time)"},
	}},
	{name: "no tombstone for an unknown claim", edits: []edit{
		{
			"	if err := e.Client.Create(ctx, c); apierrors.IsAlreadyExists(err) {",
			"	return c, nil\n	if err := e.Client.Create(ctx, c); apierrors.IsAlreadyExists(err) {",
		},
	}},

	// Entering at once.
	{name: "a lone claim is entered on what a cache says of its node group", test: "TestAClaimIsNotEnteredAtOnceOnOldKnowledge", edits: []edit{
		{"g.commit(ctx, s, d, unchanged(md)...); err", "g.commit(ctx, s, d); err"},
	}},
	{name: "whatever the caches show is written with a lone claim", edits: []edit{
		{"	if !d.EntersOnly(s, c.Spec.ClaimID) {\n", "	if d.Ledger == nil {\n"},
	}},
	{name: "a lone claim is entered by a ledger that was read after it was made", test: "TestOnlyWhatThisProcessWroteFollowsWhatItRead", edits: []edit{
		{"	if own := l.By == e.id && l.Seq == g.wrote && then.Seq+1 >= g.writtenFrom && then.Seq <= l.Seq; !own {\n		return md, nil\n	}\n", ""},
	}},
	{name: "a lone claim is entered though another agent wrote the ledger since", test: "TestOnlyWhatThisProcessWroteFollowsWhatItRead", edits: []edit{
		{"l.Seq == g.wrote && then.Seq+1 >= g.writtenFrom && then.Seq <= l.Seq; !own", "l.Seq == g.wrote; !own"},
	}},
	{name: "what this process wrote is forgotten until a cache shows it", test: "TestACacheThatLagsBehindAMarkStartsNoRun", edits: []edit{
		{"	e.written.note(c.DeepCopy())\n", ""},
	}},
	{name: "what this process wrote is believed when a cache shows more", test: "TestACacheThatShowsMoreThanThisProcessWroteIsBelieved", edits: []edit{
		{"	if err != nil || order <= 0 {\n		w.objects.Delete", "	if err != nil || order <= 0 && false {\n		w.objects.Delete"},
	}},
	{name: "a claim that has ended meanwhile is entered at once", test: "TestAClaimThatEndedMeanwhileIsNotEnteredAtOnce", edits: []edit{
		{"		default: // it has ended, or moved on, meanwhile\n			return nil, false, err\n", "		default:\n			s.Claims = append(s.Claims, c)\n"},
	}},
	{name: "what caches show refuses other calls", test: "TestAClaimIsNotEnteredAtOnceBesideOneThatIsRefused", edits: []edit{
		{"more || len(d.Refused) > 0 || s.Ledger == nil ||", "more || s.Ledger == nil ||"},
	}},
	{name: "a claim's mark waits for another reading", test: "TestAStepThatEntersClaimsMarksThem", edits: []edit{
		{"				if err := g.markNewlyAdmitted(ctx, s, d); err != nil {\n", "				if err := error(nil); err != nil {\n"},
	}},
	{name: "a claim whose entry was removed is refused its replica", test: "TestAClaimWhoseEntryWasRemovedHasItsReplica", edits: []edit{
		{"	b.readmit()\n", ""},
	}},
	{name: "a claim whose entry was removed does not wait for Machines that go", test: "TestAClaimWhoseEntryWasRemovedWaitsForMachinesThatGo", edits: []edit{
		{"c.Status.Phase == v1alpha1.PhasePending && b.leaves():", "c.Status.Phase == v1alpha1.PhasePending && b.leaves() && false:"},
	}},
	{name: "a claim whose entry was removed comes after others", test: "TestAClaimWhoseEntryWasRemovedComesBeforeOthers", edits: []edit{
		{"	b.readmit()\n	b.adopt()\n	b.admitWaiting()\n", "	b.adopt()\n	b.admitWaiting()\n	b.readmit()\n"},
	}},
	{name: "a lone claim does not wait for what is due before it", test: "TestADecisionThatOnlyEntersAClaim", edits: []edit{
		{"	if d.Ledger == nil || more || len", "	_ = more\n	if d.Ledger == nil || len"},
	}},
	{name: "a claim that waits for room is answered by the agent alone that enters it", test: "TestACallIsAnsweredWhenAnotherAgentEntersItsClaim", edits: []edit{
		{"	g.answerAdmitted(s) // whichever agent entered them\n", ""},
	}},
	{name: "a call is refused by what was read before it began", test: "TestARefusalIsNotOlderThanTheCall", edits: []edit{
		{"		g.answerThese(id, asked[id], outcome{refusal: &refusal})\n", "		g.answer(id, outcome{refusal: &refusal})\n"},
	}},
	{name: "a claim is moved on by what was read before its call began", test: "TestARefusalAnswersTheCallsThatWaitedForIt", edits: []edit{
		{"		if a.Kind != protocol.MoveOn || len(asked", "		if true || len(asked"},
	}},
	{
		name: "claims of a MachineDeployment that is created after it was missed are ended", test: "TestAMachineDeploymentThatIsCreatedMeanwhileIsNotGone",
		edits: []edit{{"	if gone, err := e.sameLedger(ctx, md); !gone || err != nil {\n", "	if _, err := e.sameLedger(ctx, md); err != nil {\n"}},
	},
	{name: "a refused claim moves on though another agent has entered it", test: "TestAClaimThatAnotherAgentEnteredMeanwhileStays", edits: []edit{
		{"		if entered, err := e.entered(ctx, c); entered || err != nil {\n", "		if entered, err := e.entered(ctx, c); entered && false || err != nil {\n"},
	}},
	{name: "work that hangs keeps events from a node group", test: "TestEventsAreNotPutOffForLong", edits: []edit{
		{"	return g.busy > 0 && busyFor >= 0 && busyFor < longestOccupied\n", "	return g.busy > 0 && busyFor >= 0\n"},
	}},
	{name: "two agents work on one node group", test: "TestAGroupIsLeftToTheAgentThatWorksOnIt", edits: []edit{
		{"	left := min(g.engine.deference-now.Sub(g.dueSince), silentDeference-now.Sub(g.dueWritten), longestDeference-now.Sub(g.dueFirst))\n", "	left := time.Duration(0)\n"},
	}},
	{name: "a clock that is set back prolongs the deference", test: "TestAClockSetBackDoesNotProlongTheDeference", edits: []edit{
		{"	if now.Before(g.dueSince) { // the clock was set back\n", "	if false && now.Before(g.dueSince) {\n"},
	}},
	{name: "a node group is left to an agent that does nothing", test: "TestAGroupIsLeftToTheAgentThatWorksOnIt", edits: []edit{
		{"	left := min(g.engine.deference-now.Sub(g.dueSince), silentDeference-now.Sub(g.dueWritten), longestDeference-now.Sub(g.dueFirst))\n", "	left := time.Second\n"},
	}},

	// The ledger: a compare-and-swap.
	{name: "no seq: two ledgers of the same content are one", edits: []edit{
		{"		next.Seq = s.Ledger.Seq + 1\n", "		next.Seq = s.Ledger.Seq\n"},
	}},
	{name: "the ledger is written without its test", edits: []edit{
		{
			"		ops = append(ops, test(annotationPath(v1alpha1.LedgerAnnotation), s.Deployment.Annotations[v1alpha1.LedgerAnnotation]))\n", "",
		},
	}},
	{name: "replicas are written without their test", edits: []edit{
		{"	ops = append(ops, test(\"/spec/replicas\", s.Group.Replicas))\n", ""},
	}},
	{name: "give-back without the generation test", edits: []edit{
		{"		ops = append(ops, test(\"/metadata/generation\", s.Deployment.Generation))\n", ""},
	}},
	{name: "floor inferred from stale Machines", smoke: true, edits: []edit{
		{
			"	b.next.Floor = max(0, b.next.Floor+b.Group.Replicas-b.next.LastReplicas)\n",
			"	b.next.Floor = 0\n" +
				"	for _, m := range b.Machines {\n" +
				"		if b.orphaned(ClaimOf(m)) && !b.next.Assigned()[m.UID] {\n" +
				"			b.next.Floor++\n" +
				"		}\n" +
				"	}\n" +
				"	b.next.Floor = min(max(0, b.next.Floor-clamp(b.next.Unassigned())), b.Group.Replicas)\n",
		},
	}},
	{name: "a human's raise is not the floor's", both: true, world: "-claims=1 -floor=1 -machines=3 -stale=0 -raises=1", violation: "I2", edits: []edit{
		{
			"	b.next.Floor = max(0, b.next.Floor+b.Group.Replicas-b.next.LastReplicas)\n",
			"	b.next.Floor = max(0, b.next.Floor+min(0, b.Group.Replicas-b.next.LastReplicas))\n",
		},
	}},
	{name: "a human's lowering is not the floor's", edits: []edit{
		{
			"	b.next.Floor = max(0, b.next.Floor+b.Group.Replicas-b.next.LastReplicas)\n",
			"	b.next.Floor = max(0, b.next.Floor+max(0, b.Group.Replicas-b.next.LastReplicas))\n",
		},
	}},
	{name: "a lost ledger is rebuilt without the claims that wait", edits: []edit{
		{"		entered := c.Status.Phase == v1alpha1.PhasePending || ", "		entered := "},
	}},
	{name: "a shortage is not made good", edits: []edit{
		{"			b.d.Replicas, b.d.Urgent = owed, true\n", "			b.d.Urgent = true\n"},
	}},
	{name: "max size ignored when a claim is entered", both: true, world: "-claims=2 -floor=0 -max=1 -machines=4 -stale=0", violation: "I6", smoke: true, edits: []edit{
		{"		case b.room(size):\n", "		case true || size > 0:\n"},
	}},
	{name: "replicas are written over a size that was set meanwhile", test: "TestReplicasAreNotWrittenOverASizeThatWasSetMeanwhile", edits: []edit{
		{"		ops = append(ops, asRead(s.Deployment, clusterv1.AutoscalerMaxSizeAnnotation))\n", ""},
	}},
	{name: "an unusable max size is none, and claims go on", world: "-claims=1 -floor=1 -max=2 -machines=3 -stale=0 -sizes=1", violation: "I6", edits: []edit{
		{"func (b *books) mayGrow() bool { return b.Group.MayGrow() && !b.next.Lowered }", "func (b *books) mayGrow() bool { return !b.next.Lowered }"},
		{"	return b.Group.Refusal()\n}\n\n// adopt", "	return nil\n}\n\n// adopt"},
	}},
	{name: "max size ignored when a shortage is made good", edits: []edit{
		{"			owed = min(owed, max(b.d.Replicas, *b.Group.Max))\n", ""},
	}},
	{name: "min size ignored", edits: []edit{
		{"	return max(b.next.Floor, b.next.Min)\n", "	return b.next.Floor\n"},
	}},

	// The ledger's budget.
	{name: "the ledger has no budget", test: "TestNoLedgerOutgrowsItsAnnotation", edits: []edit{
		{"	if size > b.left || size > *share {\n", "	if size < 0 {\n"},
	}},
	{name: "an entry counts with its present size", test: "TestNoLedgerOutgrowsItsAnnotation", edits: []edit{
		{" + max(longestName, len(entry.Machine)) + max(uidLength, len(entry.UID))\n", " + len(entry.Machine)\n"},
		{"func (s *Snapshot) newBudget(l *Ledger, limit int) *budget {\n", "func (s *Snapshot) newBudget(l *Ledger, limit int) *budget {\n	limit = math.MaxInt\n"},
		{"	\"maps\"\n	\"slices\"\n\n	\"k8s.io/apimachinery/pkg/api/validation\"\n", "	\"maps\"\n	\"math\"\n	\"slices\"\n\n	\"k8s.io/apimachinery/pkg/api/validation\"\n"},
	}},
	{name: "the annotations beside the ledger are not counted", test: "TestNoLedgerOutgrowsItsAnnotation", edits: []edit{
		{"len(v1alpha1.LedgerAnnotation) - beside\n", "len(v1alpha1.LedgerAnnotation) - 0*beside\n"},
	}},
	{name: "a claim overtakes those that wait for room in the ledger", test: "TestWhatTheLedgerHasNoRoomForWaitsInOrder", edits: []edit{
		{"		*share = 0\n", ""},
	}},
	{name: "releases keep claims out of the ledger", test: "TestWhatTheLedgerHasNoRoomForWaitsInOrder", edits: []edit{
		{"	share := limit / 4 * 3\n", "	share := limit\n"},
	}},
	{name: "claims that wait for room in the ledger are not counted at the max size", test: "TestWhatTheLedgerHasNoRoomForWaitsInOrder", edits: []edit{
		{"			size++\n", "			size = b.d.Replicas\n"},
	}},
	{name: "spares go while claims wait for room in the ledger", test: "TestWhatTheLedgerHasNoRoomForWaitsInOrder", edits: []edit{
		{"	waits := (b.next.Unassigned() > 0 || len(b.d.Queued) > 0) && b.d.Unmet == 0\n", "	waits := b.next.Unassigned() > 0 && b.d.Unmet == 0\n"},
	}},
	{name: "a call whose claim waits for room in the ledger is answered", test: "TestACallWaitsUntilTheLedgerHasRoomForItsClaim", edits: []edit{
		{"		if g.keepsWaiting(id, err) {\n", "		if err != nil && g.queued[id] {\n"},
	}},
	{name: "a refused write is a lost race", test: "TestALedgerThatTheHubRefusesIsNotRetriedAsALostRace", edits: []edit{
		{"	return (details == nil || len(details.Causes) == 0) && !denied(status)\n", "	return details == nil || !denied(nil) || true\n"},
		{"	message := err.Status().Message\n", "	if err == nil {\n		return false\n	}\n	message := err.Status().Message\n"},
	}},
	{name: "a refused ledger holds everything up", test: "TestARefusedLedgerHoldsUpNothingElse", edits: []edit{
		{"				refused = err // what the ledger permits as it is goes on\n", "				return g.retry(d, 0), err\n"},
	}},
	{name: "a MachineSet forgets Machines that still count", test: "TestAMachineSetForgetsTheMachinesThatWereReleasedLongAgo", edits: []edit{
		{"		if slices.Contains(a.Counts, uid) {\n", "		if slices.Contains(a.UIDs, uid) {\n"},
	}},

	// Rule R1: the ledger first, everything else live after it.
	{name: "R1: Machines before the ledger", edits: []edit{
		{
			"	var md clusterv1.MachineDeployment\n	if err := e.reader(from).Get(ctx, key, &md); apierrors.IsNotFound(err) {\n",
			"	var md clusterv1.MachineDeployment\n" +
				"	var early clusterv1.MachineList\n" +
				"	if err := e.reader(from).List(ctx, &early, client.InNamespace(key.Namespace), e.inGroup(from, clusterv1.MachineDeploymentNameLabel, key.Name)); err != nil {\n" +
				"		return nil, err\n" +
				"	}\n" +
				"	if err := e.reader(from).Get(ctx, key, &md); apierrors.IsNotFound(err) {\n",
		},
		{
			"	return e.readAround(ctx, from, key, &md)\n",
			"	s, err := e.readAround(ctx, from, key, &md)\n	if err != nil || s == nil {\n		return s, err\n	}\n" +
				"	s.Machines = nil\n" +
				"	for i := range early.Items {\n" +
				"		s.Machines = append(s.Machines, &early.Items[i])\n" +
				"	}\n	return s, nil\n",
		},
	}},
	{name: "R1: claims before the ledger", edits: []edit{
		{
			"	var md clusterv1.MachineDeployment\n	if err := e.reader(from).Get(ctx, key, &md); apierrors.IsNotFound(err) {\n",
			"	var md clusterv1.MachineDeployment\n" +
				"	var early v1alpha1.MachineClaimList\n" +
				"	if err := e.reader(from).List(ctx, &early, client.InNamespace(key.Namespace), e.inGroup(from, v1alpha1.NodeGroupLabel, key.Name)); err != nil {\n" +
				"		return nil, err\n" +
				"	}\n" +
				"	if err := e.reader(from).Get(ctx, key, &md); apierrors.IsNotFound(err) {\n",
		},
		{
			"	return e.readAround(ctx, from, key, &md)\n",
			"	s, err := e.readAround(ctx, from, key, &md)\n	if err != nil || s == nil {\n		return s, err\n	}\n" +
				"	s.Claims = nil\n" +
				"	for i := range early.Items {\n" +
				"		s.Claims = append(s.Claims, &early.Items[i])\n" +
				"	}\n	return s, nil\n",
		},
	}},
	{name: "R1: claims from the cache", edits: []edit{
		{"	if err := e.reader(from).List(ctx, &claims, options...); err != nil {\n", "	if err := e.Client.List(ctx, &claims, options...); err != nil {\n"},
	}},
	{name: "R1: Machines from the cache", edits: []edit{
		{
			"	if err := e.reader(from).List(ctx, &machines, members...); err != nil {\n",
			"	if err := e.Client.List(ctx, &machines, members...); err != nil {\n",
		},
	}},
	{name: "R1: MachineSets from the cache", edits: []edit{
		{
			"	if err := e.reader(from).List(ctx, &sets, members...); err != nil {\n",
			"	if err := e.Client.List(ctx, &sets, members...); err != nil {\n",
		},
	}},

	// Rule R2: the object, then the ledger live, then the patch of exactly that object.
	{name: "R2: the ledger is not read again before other writes", edits: []edit{
		{"		} else if !same {\n", "		} else if false && !same {\n"},
	}},
	{name: "R2: Machines are patched whatever became of them", edits: []edit{
		{
			"	ops := []operation{test(\"/metadata/uid\", before.UID)}\n",
			"	if true {\n		return after, e.Client.Patch(ctx, after, client.MergeFrom(before), fieldOwner)\n	}\n" +
				"	ops := []operation{test(\"/metadata/uid\", before.UID)}\n",
		},
		{
			"patchAsRead(ctx context.Context, before, after *clusterv1.Machine) error {\n",
			"patchAsRead(ctx context.Context, before, after *clusterv1.Machine) error {\n" +
				"	if true {\n		return e.Client.Patch(ctx, after, client.MergeFrom(before), fieldOwner)\n	}\n",
		},
	}},
	{name: "binding without the unset check", edits: []edit{
		{
			"	if err := e.patchMachine(ctx, machine, m); err != nil {\n		return err\n	}\n	observeBound",
			"	if err := e.Client.Patch(ctx, m, client.MergeFrom(machine), fieldOwner); err != nil {\n		return err\n	}\n	observeBound",
		},
		{
			"	case entry.UID != \"\" && m != nil && Alive(m) && !HasFinalizer(m) && ClaimOf(m) == \"\" && !had:\n		d.Actions = append(d.Actions, Action{Kind: Bind",
			"	case entry.UID != \"\" && m != nil && Alive(m) && !HasFinalizer(m) && (!had || true):\n		d.Actions = append(d.Actions, Action{Kind: Bind",
		},
	}},

	// Rule R3: not in the cache is never gone.
	{name: "R3: a Machine that the cache lacks is gone", edits: []edit{
		{
			"	if err := e.reader(from).List(ctx, &machines, members...); err != nil {\n",
			"	if err := e.Client.List(ctx, &machines, members...); err != nil {\n",
		},
		{"		err := e.Reader.Get(ctx, types.NamespacedName{Namespace: key.Namespace, Name: ref.Name}, &m)\n", "		err := e.Client.Get(ctx, types.NamespacedName{Namespace: key.Namespace, Name: ref.Name}, &m)\n"},
	}},
	{name: "R3: a claim that the cache lacks is gone", edits: []edit{
		{
			"	if err := e.Reader.Get(ctx, key.object(), &c); apierrors.IsNotFound(err) {\n		return nil, ErrNotFound\n",
			"	if err := e.Client.Get(ctx, key.object(), &c); apierrors.IsNotFound(err) {\n		return nil, ErrNotFound\n",
		},
	}},
	{name: "R3: a Cluster that the cache lacks is gone", edits: []edit{
		{"		err = e.Reader.Get(ctx, key, object)\n", ""},
	}},

	// Rule R4: "released" only when the claim is.
	{name: "R4: a claim ends before its instance is gone", edits: []edit{
		{
			"(labelled == nil || !Alive(labelled) && DeletionCompleted(labelled)) && (m == nil || Alive(m) || DeletionCompleted(m)):\n",
			"(labelled == nil || !Alive(labelled)):\n",
		},
	}},
	{name: "R4: a claim ends before its Machine is deleted", edits: []edit{
		{
			"	case !entered && (labelled == nil || !Alive(labelled) && DeletionCompleted(labelled)) && (m == nil || Alive(m) || DeletionCompleted(m)):\n",
			"	case !entered:\n",
		},
	}},
	{name: "R4: a claim ends while its Machine dies without its label", world: "-claims=1 -floor=1 -machines=3 -stale=0 -outsiders=1", violation: "E3", edits: []edit{
		{" && (m == nil || Alive(m) || DeletionCompleted(m)):\n", ":\n"},
	}},

	// Rule R5: wait for the generation of the agent's own write.
	{name: "R5: a Machine is let go before the lowering is observed", both: true, world: "-claims=1 -floor=1 -machines=3 -stale=0", violation: "I3", edits: []edit{
		{"		case recorded && r.Decremented && ours && s.reconciledFor(m, r.Generation):\n", "		case recorded && r.Decremented && ours:\n"},
	}},
	{name: "R5: numbers that look right instead of the generation", edits: []edit{
		{"		case recorded && r.Decremented && ours && s.reconciledFor(m, r.Generation):\n", "		case recorded && r.Decremented && ours && s.observed(0):\n"},
	}},
	{name: "R5: only the MachineDeployment is waited for", world: "-claims=1 -floor=1 -machines=3 -stale=0", violation: "I3", edits: []edit{
		{
			"	return s.distributed(g) && (set == nil || !behind(set))\n",
			"	return s.distributed(g) && (set == nil || !behind(set) || true)\n",
		},
	}},

	{name: "R5: reconciles that end with an error do not count", test: "TestNothingWaitsForAMachineSetWhoseReconcilesEndWithAnError", edits: []edit{
		{"		generation = max(generation, scaling.ObservedGeneration)\n", "		generation = max(generation, 0)\n"},
	}},

	// Binding.
	{name: "label before Bound", smoke: true, edits: []edit{
		{
			"	if err := e.writeStatus(ctx, c); err != nil {\n		return err\n	}\n	return e.label(ctx, c, a.Machine)\n",
			"	if err := e.label(ctx, c, a.Machine); err != nil {\n		return err\n	}\n	return e.writeStatus(ctx, c)\n",
		},
	}},
	{name: "a dead Machine stays named", world: "-claims=1 -floor=1 -machines=3 -adopt -outsiders=1 -stale=0", violation: "I2", edits: []edit{
		{"	b.unassign()\n", ""},
	}},
	{name: "a Machine is named twice", edits: []edit{
		{"	case b.assigned[m.UID]:\n		return assigned\n", ""},
	}},
	{name: "a Node in use is given to a claim", edits: []edit{
		{"	case !kept && (b.nodeless(m) || b.nodeUnregistered(m) && !b.registered(m)):\n", "	case !kept:\n"},
	}},
	{name: "the floor's Machines are given to claims", both: true, world: "-claims=1 -floor=1 -machines=3 -stale=0 -young", violation: "I6", edits: []edit{
		{"	give := len(free) + b.leaving() - int(b.floor())\n", "	give := len(free)\n"},
	}},
	{name: "a Machine of the floor that goes for long holds up a claim", test: "TestAMachineThatOthersAreDeletingHoldsUpNoClaim", edits: []edit{
		{"	give := len(free) + b.leaving() - int(b.floor())\n", "	give := len(free) - int(b.floor())\n"},
	}},
	{name: "a claim is entered on the replica of a Machine that goes", test: "TestAMachineThatOthersAreDeletingHoldsUpNoClaim", edits: []edit{
		{"	n := clamp(b.leaving())\n", "	var n int32\n"},
	}},
	{name: "a replica is lowered twice", test: "TestAReplicaIsGivenBackWhileAnotherMachineGoes", edits: []edit{
		{"		if SetOf(m) == set.Name && !reportedAsDeleting(m) {\n", "		if SetOf(m) == set.Name && Alive(m) {\n"},
	}},
	{name: "the floor's Nodes keep their taint", edits: []edit{
		{"	b.markFloors()\n", ""},
	}},
	{name: "the floor's Machine is marked before the ledger excludes it", test: "TestTheFloorsMachinesAreMarkedByTheLedgerFirst", edits: []edit{
		{"		b.floors[m.UID] = true\n		marking = append(marking, m.UID)\n", "		b.floors[m.UID] = true\n		marking = append(marking, m.UID)\n		b.d.Actions = append(b.d.Actions, Action{Kind: MarkFloor, Machine: m})\n"},
	}},
	{name: "what is about to be the floor's is promised", test: "TestTheFloorsMachinesArePromisedToNobody", edits: []edit{
		{"	case hasFloorMark(m), slices.Contains(b.next.Marking, m.UID):", "	case hasFloorMark(m), slices.Contains(b.next.Marking, \"\"):"},
		{"{ return hasFloorMark(m) || slices.Contains(b.next.Marking, m.UID) })", "{ return hasFloorMark(m) })"},
	}},
	{name: "the floor's Machine with pods is removed as a spare", edits: []edit{
		{"	free = slices.DeleteFunc(free, func(m *clusterv1.Machine) bool { return b.class(m) == ofFloor })\n", ""},
	}},
	{name: "a mark that comes late keeps a claim's Machine from it", test: "TestAClaimsLabelTakesTheMarkOff", edits: []edit{
		{"	delete(m.Annotations, v1alpha1.FloorAnnotation) //", "	//"},
	}},
	{name: "the floor takes more Machines than it has use for", test: "TestTheFloorsMachinesAreMarkedByTheLedgerFirst", edits: []edit{
		{"		return !b.nodeUnregistered(m) && !b.replaced(m)\n", "		return false\n"},
	}},
	{name: "the floor is not raised for a returned Machine", test: "TestAReturnedMachineIsTheFloorsInOneLedgerWrite", edits: []edit{
		{"		b.next.Floor = b.userOwned(b.Group.Replicas) + 1\n", ""},
	}},
	{name: "a returned Machine is one of the min size", test: "TestAReturnedMachineIsBeyondTheMinSize", edits: []edit{
		{"		b.next.Floor = b.userOwned(b.Group.Replicas) + 1\n", "		b.next.Floor++\n"},
	}},
	{name: "the user has the min size without room for it", test: "TestAReturnedMachineFillsTheMinSize", edits: []edit{
		{"	return max(b.next.Floor, min(b.next.Min, replicas-others))\n", "	return b.floor()\n"},
	}},
	{name: "the user has what claims have", test: "TestARaiseIsOfWhatTheUserHas", edits: []edit{
		{"min(b.next.Min, replicas-others)", "min(b.next.Min, replicas)"},
	}},
	{name: "a returned Machine counts for its claim, too", test: "TestAReturnedMachineCountsForNoClaim", edits: []edit{
		{"	case b.returned(m.UID):\n		return ofFloor\n", ""},
	}},
	{name: "a returned Machine that is deleted counts twice", test: "TestAReturnedMachineThatIsDeletedCountsOnce", edits: []edit{
		{"!released && !b.returned(m.UID) &&", "!released &&"},
	}},
	{name: "older agents write a ledger with a returned Machine", test: "TestAReturnedMachineIsTheFloorsInOneLedgerWrite", edits: []edit{
		{"		b.next.Version = 2\n", ""},
	}},
	{name: "a returned Machine goes for an older one of the floor", test: "TestAReturnedMachineStaysBeforeOlderOnesOfTheFloor", edits: []edit{
		{"	count(wasReturned) //", "	//"},
	}},
	{name: "the record of a return goes before its claim has ended", test: "TestTheLabelComesOffOnceTheLedgerHasTheReturn", edits: []edit{
		{"if label != r.Claim && (ended || label != \"\") {", "if label != r.Claim || ended && false {"},
	}},
	{name: "what a claim returned is released for a lost status", test: "TestAReturnedMachineIsNotReleased", edits: []edit{
		{"ClaimOf(m) != c.Spec.ClaimID || b.returned(m.UID) || b.handsOver(m)", "ClaimOf(m) != c.Spec.ClaimID || b.handsOver(m)"},
	}},
	{name: "a claim forgets over a move that it returned its Machine", test: "TestAReturnGoesOnAfterAMove", edits: []edit{
		{"	case s.recordsReturn(c):\n		d.end(c, ReasonReturned, returned)\n", ""},
	}},
	{name: "a Machine whose label was taken off is not returned", test: "TestAMachineIsReturnedWithoutItsLabel", edits: []edit{
		{"		return !entered && !b.assigned[m.UID] && !wasReturned(m)\n", "		return entered && false\n"},
	}},
	{name: "kept Machines are the user's when another one is returned", test: "TestAReturnCountsEveryOtherReplica", edits: []edit{
		{"	others := b.labelledAlone() + b.unreleased()\n", "	others := b.claimed(b.Ledger != nil) + b.unreleased()\n"},
	}},
	{name: "what is to be removed is adopted unasked", test: "TestAMachineThatIsToBeRemovedIsAdoptedOnlyByAClaimThatNeedsIt", edits: []edit{
		{"deleteRequested && c.Spec.AdoptAboveMinSize {", "deleteRequested && false {"},
	}},
	{name: "an adopted Machine is the next that goes", test: "TestAdoptedMachinesAreNotMarkedForRemoval", edits: []edit{
		{"		delete(m.Annotations, clusterv1.DeleteMachineAnnotation) //", "		//"},
	}},
	{name: "a claim that could not adopt keeps its id", test: "TestAClaimThatCannotAdoptLeavesItsID", edits: []edit{
		{"		if err := e.retract(ctx, c); err != nil {", "		if err := e.endClaim(ctx, c, v1alpha1.Event{Reason: protocol.ReasonNoRoom}); err != nil {"},
	}},
	{name: "a moved group waits for a word on claims that return their Machines", test: "TestAReturnWaitsForNoLiveSetAfterAMove", edits: []edit{
		{"c.CurrentPhase() == v1alpha1.PhaseBound && !c.Returns())\n", "c.CurrentPhase() == v1alpha1.PhaseBound)\n"},
	}},
	{name: "a return is forgotten with a move", test: "TestAReturnGoesOnAfterAMove", edits: []edit{
		{"			delete(l.Returning, uid)\n			l.Returning[m.UID] = r\n", ""},
	}},
	{name: "a claim that returned its Machine is released", edits: []edit{
		{"		if c.Status.Returned {\n			e.group(c.Namespace, c.Spec.NodeGroup).kick(ctx)\n			return c, nil // its Machine is the user's, or about to be\n		}\n", ""},
	}},
	{name: "a Machine is returned while the group is paused", test: "TestAReturnWaits", edits: []edit{
		{"if releasing || b.next.Lowered || b.Group.Has(eligibility.Paused) { // a move would lose it", "if releasing || b.next.Lowered || false && b.Group.Has(eligibility.Paused) { //"},
	}},
	{name: "replicas are raised to adopt what is to stay above the min size", test: "TestAdoptingTakesASpareElseTheUsers", edits: []edit{
		{"		case c.Spec.AdoptAboveMinSize:\n", "		case false:\n"},
	}},
	{name: "a claim whose Machine joined too early waits for ever", edits: []edit{
		{"	b.coverShortage()\n", ""},
	}},
	{name: "a Machine that joined before its report is replaced at once", test: "TestAMachineThatJoinedJustNowIsNotReplacedBeforeItsReport", edits: []edit{
		{" || b.joinedJustNow(m)):", "):"},
	}},
	{name: "an agent that has just started expects no report", test: "TestAMachineThatJoinedJustNowIsNotReplacedBeforeItsReport", edits: []edit{
		{"latest(m.Status.LastUpdated.Time, s.Started)", "m.Status.LastUpdated.Time"},
	}},
	{name: "a report is expected of a holder that reports no Nodes", test: "TestAMachineThatJoinedJustNowIsNotReplacedBeforeItsReport", edits: []edit{
		{"return s.expectsReport && HasNode(m)", "return HasNode(m)"},
	}},
	{name: "the report that something runs on a Machine does not end the wait for it", test: "TestAMachineThatJoinedJustNowIsNotReplacedBeforeItsReport", edits: []edit{
		{" && !s.Nodes[m.Spec.ProviderID] && s.reportDueIn(m) > 0", " && s.reportDueIn(m) > 0"},
	}},
	{name: "a spare that joined just now is for no claim", test: "TestASpareThatJoinedJustNowIsForTheNextClaim", edits: []edit{
		{"b.unusable(b.settled())", "b.unusable(false)"},
	}},
	{name: "a claim fails while its Machine may still be reported", test: "TestAClaimWhoseMachineJoinedTooEarlyHasItsTimeForAnotherOne", edits: []edit{
		{"	case d.awaits != \"\" && s.patient(c):\n", "	case false:\n"},
	}},
	{name: "a claim fails when another Machine is ordered for it", test: "TestAClaimWhoseMachineJoinedTooEarlyHasItsTimeForAnotherOne", edits: []edit{
		{"	case d.reordered != \"\" && s.restartsWhenReordered(c):\n", "	case false:\n"},
	}},
	{name: "another Machine is ordered before the claim has its time for it", test: "TestAClaimWhoseMachineJoinedTooEarlyHasItsTimeForAnotherOne", edits: []edit{
		{"b.covering = min(room, b.ready(waiting))", "b.covering = room"},
	}},
	{name: "Machines that are marked as they are made are replaced for ever", test: "TestMachinesThatAreMarkedAsTheyAreMadeAreNotReplacedForEver", edits: []edit{
		{"		if _, set := b.Deployment.Spec.Template.Annotations[mark]; set {\n", "		if false {\n"},
	}},
	{name: "a claim waits for a Machine that no claim may have", test: "TestAMachineThatNoClaimMayHaveIsNotWaitedFor", edits: []edit{
		{
			"case !kept && (!HasNode(m) && m.Spec.ProviderID != \"\" && !b.registered(m) || b.joinedJustNow(m)):",
			"case !HasNode(m) && m.Spec.ProviderID != \"\" && !b.registered(m), !kept && b.joinedJustNow(m):",
		},
	}},
	{name: "a release hides a shortage", test: "TestAMachineThatIsBeingReleasedHidesNoShortage", edits: []edit{
		{"		case b.class(m) == releasing && HasFinalizer(m):\n", "		case false:\n"},
	}},
	{name: "a Machine that another actor deletes as well is not replaced", test: "TestAMachineThatIsBeingReleasedHidesNoShortage", edits: []edit{
		{"		case b.class(m) == releasing && HasFinalizer(m):\n", "		case b.class(m) == releasing:\n"},
	}},
	{name: "a decremented Machine has a replica", test: "TestAMachineThatIsBeingReleasedHidesNoShortage", edits: []edit{
		{
			"		case b.class(m) == releasing && HasFinalizer(m):\n",
			"		case (b.class(m) == releasing || b.class(m) == decremented) && HasFinalizer(m):\n",
		},
	}},
	{name: "a MachineSet that is lowered hides what another one makes yet", test: "TestAMachineThatIsBeingReleasedHidesNoShortage", edits: []edit{
		{"	return !dying || !slices.ContainsFunc(b.Sets,", "	return dying || !slices.ContainsFunc(b.Sets,"},
	}},
	{name: "a claim fails before a Machine has made room", test: "TestAClaimHasTimeForTheMachineThatAnotherOneMakesRoomFor", edits: []edit{
		{"			b.d.awaits = \"a Machine that no claim may have is about to make room for another one\"\n", ""},
	}},
	{name: "a Machine makes room before the claim has its time for the next one", test: "TestAClaimHasTimeForTheMachineThatAnotherOneMakesRoomFor", edits: []edit{
		{"		release = release[:min(len(release), int(b.ready(n)))]\n", ""},
	}},
	{name: "a Machine of the user makes room before one without a Node", test: "TestAMachineWithoutANodeMakesRoomBeforeTheUsersDoes", edits: []edit{
		{"		if HasNode(x) != HasNode(y) {\n", "		if false {\n"},
	}},
	{name: "a claim is impatient after a pause", test: "TestAClaimDoesNotWaitForEverForOtherMachines", edits: []edit{
		{"began := latest(c.CreationTimestamp.Time, s.pauseEnded())", "began := c.CreationTimestamp.Time"},
	}},
	{name: "spares that make room go one after another", test: "TestSparesThatMakeRoomGoInOneWrite", edits: []edit{
		{"if n := b.waiting(); makesRoom && b.ready(n) < clamp(n) {", "if n := b.waiting(); makesRoom {"},
	}},
	{name: "a wait restarts for room that is not made", test: "TestAWaitDoesNotRestartForRoomThatIsNotMade", edits: []edit{
		{"	makesRoom := b.blocking() > 0\n", "	makesRoom := b.d.Unmet > 0\n"},
	}},
	{name: "a few marked Machines keep others from being ordered", test: "TestAFewMarkedMachinesAreNoReasonToOrderNoOthers", edits: []edit{
		{"		if lo.EveryBy(last, func", "		if lo.SomeBy(last, func"},
	}},
	{name: "a wait does not restart if another write came first", test: "TestAWaitRestartsThoughAnotherWriteCameFirst", edits: []edit{
		{"	if !apierrors.IsConflict(err) {\n		return err\n	}\n	now, readErr", "	if true {\n		return err\n	}\n	now, readErr"},
	}},
	{name: "a claim waits for ever for other Machines", test: "TestAClaimDoesNotWaitForEverForOtherMachines", edits: []edit{
		{"mostWaits*s.Failure.ObjectDeadline", "1000*s.Failure.ObjectDeadline"},
	}},
	{name: "a claim whose wait cannot restart holds others up", test: "TestClaimsWhoseWaitCannotRestartHoldNothingElseUp", edits: []edit{
		{"b.covering = min(room, b.ready(waiting))", "b.covering = lo.Ternary(int(b.ready(waiting)) < waiting, 0, room)"},
	}},
	{name: "where not all waiting claims can have a Machine, a claim whose wait cannot restart holds others up", test: "TestClaimsWhoseWaitCannotRestartHoldNothingElseUp", edits: []edit{
		{"b.covering = min(room, b.ready(waiting))", "b.covering = max(0, room-(clamp(waiting)-b.ready(waiting)))"},
	}},
	{name: "a claim fails as another Machine is ordered for another claim", test: "TestAClaimDoesNotFailAsAnotherMachineIsOrderedForAnotherClaim", edits: []edit{
		{"			g.restartWaits(ctx, s, d)\n", ""},
	}},
	{name: "Machines that something other than the template marks are replaced for ever", test: "TestMachinesThatAreMarkedAsTheyAreMadeAreNotReplacedForEver", edits: []edit{
		{"	if len(last) <= len(waiting) {\n", "	if true {\n"},
	}},
	{name: "a claim waits for a spare where a shortage is not noticed", test: "TestASpareThatJoinedJustNowIsForTheNextClaim", edits: []edit{
		{"b.unusable(b.settled())", "b.unusable(true)"},
	}},
	{name: "at the max size the user's Machine makes room", test: "TestAtTheMaxSizeMachinesThatNoClaimMayHaveMakeRoom", edits: []edit{
		{"		surplus = min(surplus, len(slices.DeleteFunc(b.free(), usable))-int(b.floor()))\n", ""},
	}},
	{name: "a Machine whose report never comes is not replaced", test: "TestAMachineThatJoinedJustNowIsNotReplacedBeforeItsReport", edits: []edit{
		{"b.d.Wake(b.reportDueIn(m))", "_ = b.reportDueIn(m)"},
	}},
	{name: "at the max size a claim waits for a Machine that none may have", test: "TestAtTheMaxSizeMachinesThatNoClaimMayHaveMakeRoom", edits: []edit{
		{"	spare := max(b.spare(), b.blocking())\n", "	spare := b.spare()\n"},
	}},
	{name: "at the max size more Machines go than claims need", test: "TestAtTheMaxSizeMachinesThatNoClaimMayHaveMakeRoom", edits: []edit{
		{"max(0, b.d.Unmet-b.unreleased())", "max(0, b.d.Unmet)"},
	}},
	{name: "an entry is dropped while its Machine has no label", edits: []edit{
		{"			case ClaimOf(assigned) == id:\n				drop(id, entry)\n", "			default:\n				drop(id, entry)\n"},
	}},

	// Cancelling and handing over.
	{name: "cancel ignores a named Machine", edits: []edit{
		{
			"	case m != nil && Alive(m) && entered && entry.UID == m.UID && ClaimOf(m) == \"\" && !HasFinalizer(m):\n		// The label first",
			"	case m != nil && Alive(m) && entered && entry.UID == m.UID && ClaimOf(m) == \"\" && !HasFinalizer(m):\n		d.end(c, ReasonCancelled, \"\")\n	case false:\n		// The label first",
		},
	}},
	{name: "replicas lowered at cancel", edits: []edit{
		{
			"	b.dropEntries()\n",
			"	before := len(b.next.Pending)\n" +
				"	b.dropEntries()\n" +
				"	for id := range b.byID {\n" +
				"		if c := b.Claim(id); before > len(b.next.Pending) && c.Status.Phase == \"Releasing\" && c.Status.Machine == nil && b.d.Replicas > 0 {\n" +
				"			before--\n" +
				"			b.d.Replicas--\n" +
				"		}\n" +
				"	}\n",
		},
	}},
	{name: "a Machine with a Node is handed over", edits: []edit{
		{"	if !Alive(m) || HasFinalizer(m) || !s.nodeless(m) || Outdated(m) || s.hasFailed(m) {\n		return false\n	}\n	if c :=", "	if !Alive(m) || HasFinalizer(m) || Outdated(m) || s.hasFailed(m) {\n		return false\n	}\n	if c :="},
	}},
	{name: "unbound before its entry is dropped", test: "TestAMachineIsHandedOverOnceItsClaimsEntryIsDropped", edits: []edit{
		{"	case m != nil && Alive(m) && !entered && ClaimOf(m) == id && s.handsOver(m)", "	case m != nil && Alive(m) && ClaimOf(m) == id && s.handsOver(m)"},
	}},

	// Releasing one Machine.
	{name: "spare handed out while its release runs", world: "-claims=2 -floor=0 -machines=3 -stale=0", violation: "I3", edits: []edit{
		{"	case recorded:\n		return releasing\n", ""},
	}},
	{name: "replicas lowered before the deletion is complete", both: true, world: "-claims=1 -floor=1 -machines=3 -stale=0", violation: "I3", edits: []edit{
		{"		case !r.Decremented && DeletionCompleted(m):\n", "		case !r.Decremented && !Alive(m):\n"},
	}},
	{name: "replicas lowered before the Machine is deleted", edits: []edit{
		{"		case !r.Decremented && DeletionCompleted(m):\n", "		case !r.Decremented:\n"},
	}},
	{name: "a Machine that somebody else removed is given back", world: "-claims=1 -floor=1 -machines=3 -outsiders=1 -stale=0", violation: "I3", edits: []edit{
		{
			"			if r.Decremented || r.Set == \"\" {\n",
			"			if !r.Decremented && r.Set == \"\" && b.d.Replicas > 0 {\n				b.d.Replicas--\n			}\n			if r.Decremented || r.Set == \"\" {\n",
		},
	}},
	{name: "deleted without our finalizer", edits: []edit{
		{"	controllerutil.AddFinalizer(m, v1alpha1.ReleaseFinalizer)\n", ""},
	}},
	{name: "a replica is given back twice", edits: []edit{
		{"		case !r.Decremented && DeletionCompleted(m):\n", "		case DeletionCompleted(m):\n"},
	}},
	{name: "a Machine is bound before the claim that hands it over has ended", edits: []edit{
		{" && ClaimOf(m) == \"\" && !had:\n", " && ClaimOf(m) == \"\" && (!had || true):\n"},
	}},
	{name: "an edited ledger's release is believed", edits: []edit{
		{"		if c := b.Claim(ClaimOf(m)); c == nil || c.CurrentPhase() != v1alpha1.PhaseReleasing {\n			delete(b.next.Releasing, uid)\n", "		if false {\n			delete(b.next.Releasing, uid)\n"},
		{"	return c != nil && c.CurrentPhase() == v1alpha1.PhaseReleasing\n", "	return true || c != nil\n"},
	}},

	// Several MachineSets.
	{name: "no paused variant", both: true, world: "-claims=1 -floor=2 -sets=2 -machines=4 -stale=0", violation: "I3", edits: []edit{
		{"	sole := len(active) == 1 && !slices", "	if len(active) == 0 {\n		return\n	}\n	sole := len(active) > 0 || !slices"},
		{"	if sole && (b.onDelete() || active[0] == b.newest()) {\n", "	if sole {\n"},
		{"		lowerable := b.lowerable(active[0], b.Group.Replicas)\n", "		lowerable := b.Group.Replicas\n"},
	}},
	{name: "a rollout's old MachineSet is lowered through the MachineDeployment", test: "TestARolloutThatMayNotSurgeHasItsOldMachineSetLowered", edits: []edit{
		{"	if sole && (b.onDelete() || active[0] == b.newest()) {\n", "	if sole {\n"},
	}},
	{name: "a paused release does not wait for another deletion's report", test: "TestAPausedReleaseWaitsForTheReportOfAnotherDeletion", edits: []edit{
		{"		if b.deletionsUnreported(begun) {\n", "		if false && b.deletionsUnreported(begun) {\n"},
	}},
	{name: "a pause begins that has to wait", test: "TestAPausedReleaseWaitsForTheReportOfAnotherDeletion", edits: []edit{
		{"(hasPausedAnnotation(set) || b.awaitsReport(set, b.readyOf(set, ready)))", "(hasPausedAnnotation(set) || false && b.awaitsReport(set, b.readyOf(set, ready)))"},
	}},
	{name: "a claim fails during the agent's own pause", test: "TestNoClaimFailsWhileTheAgentsOwnPauseLasts", edits: []edit{
		{"paused != nil && paused.Status == metav1.ConditionTrue {\n", "paused != nil && paused.Status == metav1.ConditionTrue && false {\n"},
	}},
	{name: "a pause that does not end keeps claims from failing", test: "TestNoClaimFailsWhileTheAgentsOwnPauseLasts", edits: []edit{
		{"		if left := deadline - s.Now.Sub(begun); left > 0 {\n", "		if left := deadline - min(0, s.Now.Sub(begun)); left > 0 {\n"},
	}},
	{name: "a MachineSet that was lowered under an earlier pause is lowered for again", test: "TestAMachineSetThatWasLoweredUnderAnEarlierPauseIsNotLoweredFor", edits: []edit{
		{"		if set != nil && slices.Contains(ReleasedFrom(set), uid) {\n", "		if false && set != nil && slices.Contains(ReleasedFrom(set), uid) {\n"},
	}},
	{name: "paused step not repeatable", edits: []edit{
		{
			"	metav1.SetMetaDataAnnotation(&set.ObjectMeta, v1alpha1.ReleasedAnnotation, protocol.JoinUIDs(uids))\n",
			"	if err := e.patchSet(ctx, a.Set, set.DeepCopy()); err != nil {\n		return err\n	}\n" +
				"	if err := e.Client.Get(ctx, client.ObjectKeyFromObject(set), a.Set); err != nil {\n		return err\n	}\n" +
				"	set = a.Set.DeepCopy()\n" +
				"	metav1.SetMetaDataAnnotation(&set.ObjectMeta, v1alpha1.ReleasedAnnotation, protocol.JoinUIDs(uids))\n",
		},
	}},
	{name: "recovery merely un-pauses", test: "TestAPausedStepThatSomebodyLeftIsCompleted", edits: []edit{
		{"	spareSince time.Time\n	lastQuiet", "	recovered  bool\n	spareSince time.Time\n	lastQuiet"},
		{
			"		s.SpareSince = g.spareSince\n		d := e.decide(s)\n		keepClaimed(s, d)\n		g.noteSpare(s, d)\n",
			"		s.SpareSince = g.spareSince\n		d := e.decide(s)\n" +
				"		if !g.recovered && s.Ledger != nil && s.Deployment.Annotations[clusterv1.PausedAnnotation] == \"agent.karpenter.cluster.x-k8s.io\" {\n" +
				"			d = &protocol.Decision{Ledger: s.Ledger.Clone(), Replicas: s.Group.Replicas, Pause: protocol.PauseRemove, Urgent: true}\n" +
				"			for uid, r := range d.Ledger.Releasing {\n" +
				"				if !r.Decremented {\n" +
				"					r.Set = \"\"\n" +
				"					d.Ledger.Releasing[uid] = r\n" +
				"				}\n" +
				"			}\n" +
				"		}\n" +
				"		g.recovered = true\n" +
				"		g.noteSpare(s, d)\n",
		},
	}},
	{name: "a MachineSet is lowered before the pause is observed", test: "TestAMachineSetIsLoweredOnceThePauseIsObserved", edits: []edit{
		{"	case ours && IsPaused(b.Deployment.Status.Conditions) && b.setsLowered(begun):\n", "	case ours && b.setsLowered(begun):\n"},
	}},
	{name: "a lowered MachineSet is not waited for", world: "-claims=1 -floor=2 -sets=2 -machines=4 -stale=0", violation: "I3", edits: []edit{
		{"		case set != nil && behind(set) && !observedAsPaused(set):\n", "		case set != nil && actedOn(set) < 0:\n"},
	}},

	// Machines that no claim has.
	{name: "unbound surge Machine released during a rollout", edits: []edit{
		{"	if b.rollingOut() || !observed && len(gone) == 0 {\n", "	if false {\n"},
		{"	case waits || !observed:\n", "	case waits || !observed && false:\n"},
	}},
	{name: "the floor's Machines are released as spares", edits: []edit{
		{"	surplus := min(len(free)-int(b.floor()), int(spare))\n", "	surplus := min(len(free), int(spare)+1)\n"},
		{"	if spare <= 0 || !b.mayShrink() {\n		return nil\n	}\n", ""},
		{"	if waits && len(gone) == 0 {\n", "	if b.next.Unassigned() > 0 {\n"},
	}},
	{name: "spares are never released", edits: []edit{
		{"	b.releaseSpare()\n", ""},
	}},
	{name: "blocked replicas are never given back", edits: []edit{
		{"	b.shrink()\n", ""},
	}},
	{name: "blocked spares are counted down without a pause", both: true, world: "-claims=1 -floor=1 -machines=3 -stale=0", violation: "I3", edits: []edit{
		{
			"	if b.next.Shrink == nil {\n		for _, set",
			"	if may && b.graceOver() {\n		b.d.Replicas -= missing\n		b.d.Urgent = true\n		return\n	}\n	if b.next.Shrink == nil {\n		for _, set",
		},
	}},
	{name: "blocked spares are counted before the pause is observed", world: "-claims=1 -floor=1 -machines=3 -stale=0", violation: "I3", edits: []edit{
		{"		case !IsPaused(set.Status.Conditions):\n", "		case false:\n"},
	}},
	{name: "a MachineSet is unpaused before it was lowered", edits: []edit{
		{
			"		if overtaken || b.scaleDownObserved() && b.d.Replicas == b.Group.Replicas {\n",
			"		if overtaken || b.d.Replicas >= 0 {\n",
		},
	}},
	{name: "blocked spares are counted down while a template change is unseen", test: "TestSparesThatNeverCameAreCountedOnceTheTemplateIsSeen", edits: []edit{
		{"		case b.replicasDistributed():\n			b.d.Replicas", "		case true:\n			b.d.Replicas"},
	}},
	{name: "a MachineSet stays paused until it was told of a raise that is put off", world: "-claims=1 -floor=1 -machines=6 -stale=0 -raises=1", violation: "I4", edits: []edit{
		{"		case b.scaleDownObserved(): // a raise is put off until it is unpaused\n", "		case false:\n"},
	}},
	{name: "a MachineSet stays paused until it was raised as well", test: "TestAMachineSetIsUnpausedAlthoughARaiseIsPutOff", edits: []edit{
		{"		if overtaken || b.scaleDownObserved() && b.d.Replicas == b.Group.Replicas {\n", "		if overtaken || b.replicasDistributed() && b.d.Replicas == b.Group.Replicas {\n"},
	}},
	{name: "a MachineSet stays paused while a rollout waits for it", test: "TestAMachineSetThatARolloutWaitsForIsUnpaused", edits: []edit{
		{" || !b.onDelete() && b.newest() != set\n", "\n"},
	}},
	{name: "a MachineSet is unpaused by an agent whose grace period is not over", test: "TestAMachineSetStaysPausedForAnAgentWhoseGracePeriodIsNotOver", edits: []edit{
		{"	may = may && active[0] == set\n", "	may = may && active[0] == set && b.graceOver()\n"},
	}},
	{name: "a MachineSet that is paused for an unknown reason stays so", test: "TestAMachineSetThatIsPausedForAnUnknownReasonIsUnpaused", edits: []edit{
		{"				b.next.Shrink = &Shrink{Set: set.Name, Done: true} // the reason is lost\n				return\n", ""},
	}},

	{name: "a MachineDeployment is paused while its MachineSet is", test: "TestOnePauseAtATime", edits: []edit{
		{"		if !paused && b.next.Shrink == nil {\n", "		if !paused {\n"},
	}},
	{
		name: "a MachineDeployment is paused for a MachineSet that a person paused", test: "TestAMachineSetThatAPersonPausedHoldsUpItsOwnReleasesAlone",
		edits: []edit{{"set != nil && (hasPausedAnnotation(set) || b.awaitsReport(set,", "set != nil && (false && hasPausedAnnotation(set) || b.awaitsReport(set,"}},
	},
	{name: "a MachineSet is paused while its MachineDeployment is", test: "TestOnePauseAtATime", edits: []edit{
		{" && !hasPausedAnnotation(active[0]) && !b.lowersUnderPause() {\n", " && !hasPausedAnnotation(active[0]) {\n"},
	}},

	// What was lost with the ledger.
	{name: "a lost ledger counts Machines whose replica was given back", world: "-claims=1 -floor=1 -machines=3 -stale=0 -wipes=1", violation: "I6", edits: []edit{
		{"			back := DeletionCompleted(m)\n", "			back := false\n"},
	}},
	{name: "a lost ledger counts a Machine that goes and whose replica was taken already", test: "TestAWipedLedgerDoesNotCountAMachineThatGoes", edits: []edit{
		{"		case !Alive(m) && !s.keeps(ClaimOf(m)):\n", "		case !Alive(m) && ClaimOf(m) == \"\":\n"},
	}},
	{name: "a lost ledger counts a Machine that was handed over twice", world: "-claims=2 -floor=1 -machines=3 -stale=0 -wipes=1", violation: "I6", edits: []edit{
		{" || c.Status.Phase == v1alpha1.PhaseBound && c.Status.Machine != nil\n", " || c.Status.Machine != nil\n"},
	}},
	{name: "a Machine that no ledger knows goes before its lowering was seen", world: "-claims=1 -floor=1 -machines=3 -stale=0 -wipes=1", violation: "I3", edits: []edit{
		{"		case !recorded && stopped && s.reconciledFor(m, s.Deployment.Generation):\n", "		case !recorded && stopped:\n"},
	}},
	{name: "a pause that no ledger knows stays", world: "-claims=1 -floor=2 -sets=2 -machines=4 -stale=0 -wipes=1", violation: "I4", edits: []edit{
		{"	b.unpause()\n", ""},
	}},
	{name: "a replica that a rollout took is given back once more", world: "-claims=2 -floor=1 -machines=5 -rolling -rollouts=1 -stale=0 -walks=1000000 -depth=150", violation: "I3", edits: []edit{
		{"		begun = b.skipReplaced(begun)\n", ""},
	}},

	// Lost objects.
	{name: "a claim whose object was lost has no right any more", edits: []edit{
		{"	c := s.Claim(claimID)\n	return c != nil && c.CurrentPhase() == v1alpha1.PhaseEnded\n", "	c := s.Claim(claimID)\n	return c == nil || c.CurrentPhase() == v1alpha1.PhaseEnded\n"},
	}},
	{name: "a lost claim is made again without its holder", edits: []edit{
		{"if len(validation.IsDNS1123Label(holder)) > 0 {\n", "if true {\n"},
	}},
	{name: "a claim that lost its status gets a second Machine", edits: []edit{
		{"		if _, entered := b.next.Pending[id]; entered || b.d.Queued[id] || b.labelled(id) != nil {\n			continue // a claim", "		if _, entered := b.next.Pending[id]; entered || b.d.Queued[id] {\n			continue // a claim"},
		{"			if s.labelled(id) != nil {\n", "			if false {\n"},
	}},
	{name: "a claim that lost its status while its Machine is deleted gets another", test: "TestAClaimThatLostItsStatusWhileItsMachineIsDeletedGetsNoOther", edits: []edit{
		{"		if b.labelled(id) != nil {\n			continue\n		}\n", ""},
		{"			if s.labelled(id) != nil {\n", "			if owned := s.labelled(id); owned != nil && Alive(owned) {\n"},
	}},

	// Machines that are created again.
	{name: "a Machine that was being released and was made again stays for ever", test: "TestTheReleaseOfAMachineThatWasMadeAgainGoesOn", edits: []edit{
		{"		if b.class(m) == stranded {\n", "		if b.class(m) == stranded && false {\n"},
	}},
	{name: "a Machine that was made again is released while its Cluster is paused", test: "TestTheReleaseOfAMachineThatWasMadeAgainGoesOn", edits: []edit{
		{"	if !b.mayShrink() {\n		return\n	}\n	for _, m := range b.Machines {\n", "	for _, m := range b.Machines {\n"},
	}},
	{name: "a claim's Machine that was made again stays marked", test: "TestAClaimKeepsItsMachineThatWasMadeAgainDuringItsRelease", edits: []edit{
		{"Alive(m) && HasFinalizer(m) && s.boundTo(m) != nil:\n", "false && s.boundTo(m) != nil:\n"},
	}},
	{name: "a Machine is deleted though its finalizer was taken off", test: "TestAMachineThatIsKeptMeanwhileIsNotDeleted", edits: []edit{
		{"		version = m.ResourceVersion // the patch did not test that the finalizer stays\n", "		_ = m\n"},
	}},

	{name: "claims of a MachineDeployment that is no more take the replicas of the next one", edits: []edit{
		{"c.Status.NodeGroupUID == s.Deployment.UID || s.labelled(id) != nil {\n", "true || s.labelled(id) != nil {\n"},
	}},
	{name: "claims of a MachineDeployment that is no more freeze the next one", test: "TestAMachineDeploymentThatWasMadeAgainIsNotFrozen", edits: []edit{
		{" && c.Status.Machine != nil && !b.leftBehind(c) && !b.returned(c.Status.Machine.UID) {\n", " && c.Status.Machine != nil && !b.returned(c.Status.Machine.UID) {\n"},
	}},
	{name: "a restored claim does not know its MachineDeployment", test: "TestARestoredClaimKnowsItsMachineDeployment", edits: []edit{
		{"	c.Status.NodeGroupUID = a.Group\n", ""},
	}},
	{name: "a ledger is believed that came with a MachineDeployment that was made again", test: "TestAMachineDeploymentThatWasMadeAgainKeepsItsFloor", edits: []edit{
		{"	if s.MadeAgain() {\n", "	if s.MadeAgain() && false {\n"},
	}},
	{name: "the ledger of a MachineDeployment that was moved is not believed", test: "TestAMachineDeploymentThatWasMovedKeepsItsLedger", edits: []edit{
		{"c.CurrentPhase() != v1alpha1.PhaseEnded && c.Status.NodeGroupUID == s.Ledger.UID\n	})", "false\n	}) || true"},
	}},
	{name: "a ledger is written to a MachineDeployment that was made again", test: "TestWhatWasDecidedForAMachineDeploymentIsNotDoneToTheNextOne", edits: []edit{
		{"		ops = append(ops, test(\"/metadata/uid\", s.Deployment.UID)) // not one", "		_ = s.Deployment.UID // not one"},
	}},
	{name: "what a ledger permitted is done after its MachineDeployment was made again", test: "TestWhatWasDecidedForAMachineDeploymentIsNotDoneToTheNextOne", edits: []edit{
		{"	} else if err == nil && md.UID != read.UID {\n", "	} else if false && md.UID != read.UID {\n"},
	}},

	// Collection.
	{name: "collection without a token", edits: []edit{
		{"case !listed(c) || !c.CreationTimestamp.Add(e.CollectGrace).Before(taken.Time):", "case listed == nil:"},
	}},
	{name: "collection of claims that are as old as the token", edits: []edit{
		{
			"case !listed(c) || !c.CreationTimestamp.Add(e.CollectGrace).Before(taken.Time):",
			"case listed == nil || c.CreationTimestamp.Add(-e.CollectGrace).After(taken.Time):",
		},
	}},
	{name: "collection by the agent's clock alone", test: "TestAClaimMadeAfterTheListingIsNotCollectedByAClockThatIsAhead", edits: []edit{
		{"case !listed(c) || ", "case listed == nil || "},
	}},
	{name: "a live set decides claims that its listing did not hold", test: "TestALiveSetDecidesNothingOfClaimsThatItsListingDidNotHold", edits: []edit{
		{"		return protocol.Reported(c) && !e.synced[holderKey{cluster, c.Spec.Holder}][c.UID]\n", "		return protocol.Reported(c) && len(e.synced[holderKey{cluster, c.Spec.Holder}]) == 0\n"},
	}},
	{name: "what one agent listed is of the future for the other", test: "TestTokensAreBoundToTheirHolderAndTime", edits: []edit{
		{"	if t.Time.After(now) { // by", "	if false { // by"},
	}},
	{name: "a clock that is ahead hastens what cannot be taken back", test: "TestAClockThatIsAheadConcludesNothingEarly", edits: []edit{
		{"return s.Now.Sub(at) - skew }", "return s.Now.Sub(at) - 0*skew }"},
	}},
	{name: "deadlines are over before their time", test: "TestALateMachineIsReleasedAndOneThatTakesSeveralDeadlinesFails", edits: []edit{
		{"	if left := deadline - s.Now.Sub(since); left > 0 {\n", "	if left := deadline/4 - s.Now.Sub(since); left > 0 {\n"},
	}},
	{name: "collection by the set of another cluster", edits: []edit{
		{"	case !s.covers(c) && c.Spec.Spoke != \"\":\n", "	case false:\n"},
		{"	case !s.covers(c):\n", "	case false:\n"},
		{"	if spoke == \"\" || spoke == known {\n", "	if true {\n"},
	}},
	{name: "the first set of another cluster is accepted", test: "TestOnlyTheClusterOfTheShimIsSynchronized", edits: []edit{
		{"	case known != \"\":\n", "	case false:\n"},
	}},
	{name: "another cluster's claims are made", test: "TestOnlyTheClusterOfTheShimMakesClaims", edits: []edit{
		{"		return c, e.mayMake(ctx, r, c)\n", "		return c, e.room(ctx, c, true)\n"},
		{"	refused := e.mayMake(ctx, r, c)\n", "	refused := e.room(ctx, c, false)\n"},
	}},
	{name: "what another agent recorded is not read", test: "TestTheSpokeIsReadBeforeItDecides", edits: []edit{
		{"if known, err = e.ReadSpokeOf(ctx, cluster); err != nil {", "if known, err = e.SpokeOf(cluster), nil; err != nil {"},
	}},
	{name: "another cluster is recorded with each set", test: "TestAnotherClusterIsRecordedOnceItIsKnown", edits: []edit{
		{" && (c.Spec.Spoke == \"\" || s.known == s.Spoke || !e.recordsSpoke(s.Holder))\n", "\n"},
	}},
	{
		name: "callers can tell another Cluster's node groups from names that do not exist",
		test: "TestAnotherClustersNodeGroupsAreAnsweredLikeThoseThatDoNotExist",
		edits: []edit{
			{"apierrors.IsNotFound(err) || err == nil && md.Spec.ClusterName != cluster.Name; missing {\n", "apierrors.IsNotFound(err); missing {\n"},
		},
	},
	{name: "collection of claims whose Nodes were registered", edits: []edit{
		{"	case running || c.Status.NodeRegisteredAt != nil:\n", "	case running && false:\n"},
	}},
	{name: "any holder's claim is released", test: "TestAnotherHoldersClaimIsNeitherReleasedNorFollowed", edits: []edit{
		{"c.CurrentPhase() == v1alpha1.PhaseEnded || h(c.Spec.Holder) {\n", "c.CurrentPhase() == v1alpha1.PhaseEnded || true {\n"},
	}},

	{name: "a late Machine fails its claim", test: "TestALateMachineComesInTheEnd", edits: []edit{
		{"			verdict, reason = TimeOut, ReasonLate\n", ""},
	}},
	{name: "a Machine that was handed over is late for its next claim at once", test: "TestALateMachineIsReleasedAndOneThatTakesSeveralDeadlinesFails", edits: []edit{
		{"at != nil && at.After(m.CreationTimestamp.Time)", "at != nil && at.Before(&m.CreationTimestamp)"},
	}},
	{name: "a late Machine is nobody's next", test: "TestALateMachineIsTheNextClaimsUntilItHasTakenSeveralDeadlines", edits: []edit{
		{"given > 0 && s.Now.Sub(latest(m.CreationTimestamp.Time, unpausedAt(m.Status.Conditions))) >= given", "given > 0 && s.Now.Sub(m.CreationTimestamp.Time) >= given/Patience"},
	}},
	{name: "a Machine that never comes is always late", test: "TestAMachineThatNeverComesIsGivenUpInTheEnd", edits: []edit{
		{"if why = s.overdue(d, since, given, what); why == \"\" {", "{"},
		{">= given {", "< 0 {"},
	}},
	{name: "a spare has the grace period of the one before it", test: "TestASpareHasAGracePeriodOfItsOwn", edits: []edit{
		{"if d.HasSpare || s.Seq() > g.spareSeq && !g.engine.written.has(s.Deployment) {", "if d.HasSpare {"},
	}},
	{name: "a claim in a hurry makes machines fail", test: "TestWhatTheNodeGroupSaysOfDeadlinesCountsBeforeTheClaimAndThatBeforeTheOptions", edits: []edit{
		{
			"	since, given := latest(m.CreationTimestamp.Time, unpausedAt(m.Status.Conditions)), s.failsAfter(option)\n",
			"	since, given := latest(m.CreationTimestamp.Time, unpausedAt(m.Status.Conditions)), Patience*lateAfter(s.Group.MaxNodeProvisionTime, c, option)\n",
		},
	}},
	{name: "a machine is not kept for the most patient claim", test: "TestAMachineIsKeptForTheMostPatientClaim", edits: []edit{
		{"	return Patience * max(option, s.longest)\n", "	return Patience * option\n"},
	}},
	{name: "a claim's own time counts before its node group's", test: "TestWhatTheNodeGroupSaysOfDeadlinesCountsBeforeTheClaimAndThatBeforeTheOptions", edits: []edit{
		{"	return cmp.Or(ofGroup, c.MaxNodeProvisionTime(), option)\n", "	return cmp.Or(c.MaxNodeProvisionTime(), ofGroup, option)\n"},
	}},
	{name: "a claim that is restored forgets why it failed", test: "TestARestoredClaimThatFailedKeepsItsReason", edits: []edit{
		{"	if c.Status.FailedAt == nil { // why it failed matters more\n", "	{\n"},
	}},

	// MachineDeployments that are deleted.
	{name: "a deleted group's MachineSet stays paused for spares", test: "TestAGroupThatIsBeingDeletedIsNotKeptPaused", edits: []edit{
		{"overtaken := b.deleted() || ", "overtaken := "},
	}},
	{name: "a deleted group stays paused for a release", test: "TestAGroupThatIsBeingDeletedIsNotKeptPaused", edits: []edit{
		{"		if b.deleted() && r.Set != \"\" {\n", "		if b.deleted() && false {\n"},
	}},
	{name: "the Machines of a deleted group are held until their MachineSets act", test: "TestAMachineOfAGroupThatIsBeingDeletedIsLetGo", edits: []edit{
		{"		case stopped && s.deleted():\n", "		case stopped && false:\n"},
	}},
	{name: "a MachineSet that outlives its MachineDeployment stays paused", test: "TestAMachineSetThatWasLeftBehindIsUnpaused", edits: []edit{
		{"range s.Sets { // left behind as well\n		if set.Annotations", "range s.Sets { // left behind as well\n		if false && set.Annotations"},
	}},

	// Machines that will not come, come too soon, or have no room.
	{name: "a Machine whose infrastructure is gone is waited for", test: "TestAMachineWithoutInfrastructureIsGivenUp", edits: []edit{
		{"s.ago(since) >= missingAfter", "s.Now.Sub(since) < 0"},
	}},
	{name: "a claim fails that a Machine is being given to", test: "TestAClaimDoesNotFailWhenAMachineIsBeingGivenToIt", edits: []edit{
		{"	case d.Ledger != nil && d.Ledger.Pending[c.Spec.ClaimID].UID != \"\":\n", "	case false:\n"},
	}},
	{name: "an outage counts as waiting for a Machine", test: "TestADeadlineThatPassedWhileNoAgentLookedBeginsAnew", edits: []edit{
		{"	case overdue > punctual:\n", "	case overdue > punctual*1e6:\n"},
	}},
	{name: "an agent that just started lets claims fail", test: "TestAnAgentThatJustStartedLetsNoClaimFail", edits: []edit{
		{"	case overdue < 0 || unsettled > 0:\n", "	case overdue < 0:\n"},
	}},
	{name: "what often passes is final at once", test: "TestAMachineIsGivenUpForWhatIsKnownOfItsProvider", edits: []edit{
		{"verdict.After > 0 && left > 0 {", "verdict.After < 0 && left > 0 {"},
	}},
	{name: "an infrastructure object that was asked is not heard", test: "TestWhereTheMachineSaysNothingItsInfrastructureIsAsked", edits: []edit{
		{"seen && report.Reason != \"\" {", "seen && report.Reason == \"\" {"},
	}},
	{name: "a pause counts as waiting for a Machine", test: "TestAClaimOfAPausedGroupDoesNotFail", edits: []edit{
		{"	if m != nil && HasNode(m) || s.paused(m) {\n", "	if m != nil && (HasNode(m) || s.paused(m)) {\n"},
	}},
	{name: "the time of a pause counts as waiting for a Machine", test: "TestTheTimeOfAPauseIsNotTimeForAMachine", edits: []edit{
		{"s.Now.Sub(latest(since, s.pauseEnded()))", "s.Now.Sub(since)"},
	}},
	{name: "the agent's own pauses extend deadlines", test: "TestTheAgentsOwnPausesExtendNoDeadline", edits: []edit{
		{"		return time.Unix(own.Before, 0)\n", "		return ended\n"},
	}},
	{name: "a pause that follows one of the agent's counts as waiting", test: "TestOnlyThePausesOfOthersAreNotTimeForAMachine", edits: []edit{
		{"(s.pausedByAgent() || !ended.After(time.Unix(own.At, 0).Add(ownPauseEnds)))", "(s.pausedByAgent() || !ended.IsZero())"},
	}},
	{name: "a claim fails when a person's pause has just ended", test: "TestNoClaimFailsWhenAPersonsPauseHasJustEnded", edits: []edit{
		{"		ended = s.Now // it has just ended", "		// it has just ended"},
	}},
	{name: "a pause that is due is other work at each look", test: "TestAPauseThatIsDueIsTheSameWorkAtEachLook", edits: []edit{
		{"		next.Paused = nil // it has the time of this look\n", ""},
	}},
	{name: "a claim is explained anew with each number", test: "TestExplanationsOfABlockedGroupAreFew", edits: []edit{
		{"			return oneLine(reasons)\n", "			return oneLine(reasons) + c.Message\n"},
		{"left := explainEvery - s.Now.Sub(c.Status.History[n-1].Time.Time); left > 0 {\n", "left := explainEvery - s.Now.Sub(c.Status.History[n-1].Time.Time); left > explainEvery {\n"},
	}},
	{name: "a claim is explained anew with each message of its infrastructure", test: "TestABoundClaimThatWaitsForLongShowsWhatItsInfrastructureReports", edits: []edit{
		{"		} else if strings.HasPrefix(c.Status.Message, head) {\n", "		} else if c.Status.Message == event.Message {\n"},
	}},
	{name: "trouble that comes and goes is explained each time", test: "TestTroubleThatComesAndGoesIsExplainedOnceAMinute", edits: []edit{
		{"		left = max(left, explainEvery-s.Now.Sub(c.Status.History[n-1].Time.Time))\n", ""},
	}},
	{name: "another trouble hides that a claim's owner is missing", test: "TestWhatIsWrongWithAClaimMattersMoreThanItsInfrastructure", edits: []edit{
		{"	default: // another explanation, which matters more\n		return\n", ""},
	}},
	{name: "writes that fail starve the others", test: "TestWritesThatFailDoNotStarveTheOthers", edits: []edit{
		{"		at := g.skip % len(last)\n", "		at := g.skip * 0\n"},
	}},
	{name: "whether a Machine can be made is not looked at", test: "TestAGroupForWhichNoMachineCanBeMadeTakesClaimsForSparesOnly", edits: []edit{
		{"		if e.NoMachines != nil {\n", "		if e.NoMachines == nil && md == nil {\n"},
	}},
	{name: "Machines that join too soon are named as late as others", test: "TestAMachineIsNamedAtOnceWhereOthersJoinedTooSoon", edits: []edit{
		{"	case d.Unusable > 0 && s.NewlyAssigned(d.Ledger, false):", "	case d.Unusable > 0 && false:"},
	}},

	// Sizes that cannot be used, and other writers of replicas.
	{name: "Machines are removed while a size cannot be used", test: "TestNoSpareIsRemovedWhileASizeCannotBeUsed", edits: []edit{
		{"return b.Group.MayShrink() && !b.next.Lowered", "return !b.Group.Has(eligibility.Paused) && !b.next.Lowered"},
	}},
	{name: "an unusable min size is taken for none", test: "TestTheLastGoodMinSizeStaysInForce", edits: []edit{
		{"	if b.Group.SizesUsable() {\n", "	if true {\n"},
	}},
	{name: "another reason hides a pause", test: "TestAPauseIsRespectedWhateverElseIsWrong", edits: []edit{
		{"return b.Group.MayShrink() && !b.next.Lowered", "return (len(b.Group.Refusals) != 1 || b.Group.MayShrink()) && !b.next.Lowered"},
	}},
	{name: "replicas are raised where a topology sets them", test: "TestNothingIsRaisedWhereAnotherOwnerSetsTheReplicas", edits: []edit{
		{"owed > b.d.Replicas && b.mayGrow() {", "owed > b.d.Replicas && !b.next.Lowered {"},
	}},
	{name: "replicas that were lowered below what is claimed are raised again", test: "TestReplicasLoweredBelowWhatIsClaimedFreezeTheGroup", edits: []edit{
		{"	case b.Group.Replicas < b.claimed(b.Ledger != nil) && (", "	case false && ("},
	}},
	{name: "a frozen group's replicas are raised", test: "TestReplicasLoweredBelowWhatIsClaimedFreezeTheGroup", edits: []edit{
		{"owed > b.d.Replicas && b.mayGrow() {", "owed > b.d.Replicas && b.Group.MayGrow() {"},
	}},
	{name: "clearing a frozen group lowers the floor", test: "TestWhenAPersonClearsItTheUserHasTheFloorThatTheUserHad", edits: []edit{
		{
			"		b.next.Lowered, b.next.LastReplicas = false, b.Group.Replicas\n		b.next.Written = &Written{Replicas: b.Group.Replicas}\n		return\n",
			"		b.next.Lowered = false\n",
		},
	}},

	{name: "a tool that writes one number again and again moves the floor each time", test: "TestANumberThatIsRestoredTwiceFreezesTheGroup", edits: []edit{
		{"	return next.Restored >= restoredOften\n", "	return false\n"},
	}},
	{name: "a person who scales now and then is taken for a tool", test: "TestAPersonMayScaleAsOftenAsTheyLike", edits: []edit{
		{"was.Restored > 0 && ago < restoredWithin {", "was.Restored > 0 && ago >= 0 {"},
	}},

	// Nodes that Cluster API has not seen.
	{name: "a Machine whose Node is unseen is promised", test: "TestAMachineWhoseNodeIsUnseenIsNotPromised", edits: []edit{
		{"	return inspected(m)\n", "	return true\n"},
	}},
	{name: "Cluster API's wait for the Cluster is taken for a statement about the Node", test: "TestAMachineWhoseNodeIsUnseenIsNotHandedOver", edits: []edit{
		{" && strings.Contains(c.Message, m.Spec.ProviderID)", " && strings.Contains(c.Message, \"\")"},
	}},
	{name: "what the holder reported is forgotten", test: "TestAMachineWhoseNodeIsUnseenIsNotHandedOver", edits: []edit{
		{"	case HasNode(m), s.registered(m):\n", "	case HasNode(m):\n"},
	}},
	{name: "a drained Machine is handed over", test: "TestWhatWasDrainedIsNeverHandedOver", edits: []edit{
		{"(c.Status.FailedAt != nil || c.Status.Drained)", "c.Status.FailedAt != nil"},
	}},
	{name: "a node deadline needs no report of the holder", test: "TestANodeDeadlineNeedsBothStatements", edits: []edit{
		{"	case absent == nil || absent.Time.Before(due.Truncate(time.Second)) || s.Now.Sub(absent.Time) > absenceLife:\n", "	case false && absent == nil:\n"},
	}},
	{name: "a release begins while its group is paused", test: "TestReleasesWaitWhileTheGroupIsPaused", edits: []edit{
		{"if !Alive(m) || b.Group.Has(eligibility.Paused) {", "if !Alive(m) || b.Group.Has(eligibility.Gone) {"},
	}},
	{name: "a Machine is deleted while its group is paused", test: "TestReleasesWaitWhileTheGroupIsPaused", edits: []edit{
		{" && s.mayDelete(m) && !s.Group.Has(eligibility.Paused):", " && s.mayDelete(m):"},
	}},
	{name: "the time of a pause makes a Machine hopeless", test: "TestTheTimeOfAPauseMakesNoMachineHopeless", edits: []edit{
		{"s.Now.Sub(latest(m.CreationTimestamp.Time, unpausedAt(m.Status.Conditions))) >= given", "s.Now.Sub(m.CreationTimestamp.Time) >= given"},
	}},
	{name: "the time of a pause counts", test: "TestTheTimeOfAPauseDoesNotCount", edits: []edit{
		{"latest(boundAt(c, m), unpausedAt(m.Status.Conditions))", "latest(boundAt(c, m), boundAt(c, m))"},
	}},
	{name: "what was stated before a pause counts after it", test: "TestRightAfterAPauseNothingIsStated", edits: []edit{
		{"> unpauseSettles && s.ago", "> 1000*unpauseSettles && s.ago"},
	}},

	// Objects that are created again, by a move or a restore.
	{name: "a Machine that vanishes under a pause is lost", test: "TestNothingIsConcludedWhileTheClusterIsPaused", edits: []edit{
		{"	case s.Group.Suspended:\n		return s.Group.Refusal()\n", ""},
	}},
	{name: "a pause that the cache does not show counts for nothing", test: "TestAMachineThatVanishesUnderAPauseThatTheCacheDoesNotShowIsNotLost", edits: []edit{
		{"!eligibility.ClusterPaused(cluster) && (s.Lacks() || ", "!eligibility.ClusterPaused(cluster) && (false || "},
	}},
	{name: "the claims of a MachineDeployment end that vanishes under a pause", test: "TestTheClaimsOfAMachineDeploymentThatVanishesUnderAPauseDoNotEnd", edits: []edit{
		{"			held[name] = err\n", "			held[name] = nil\n"},
	}},
	{name: "a claim is said not to be there while its Cluster is moved", test: "TestNobodyIsToldThatAClaimIsGoneWhileItsClusterIsOnItsWay", edits: []edit{
		{"	case eligibility.ClusterPaused(cluster):\n		return nil, ErrClusterPaused\n", ""},
	}},
	{name: "a release is taken that a move loses", test: "TestAReleaseIsNotTakenWhileTheClusterIsPaused", edits: []edit{
		{"	case paused:\n		return ErrClusterPaused\n", "	case paused && false:\n		return ErrClusterPaused\n"},
	}},
	{name: "claims are listed before it is known what they have", test: "TestAClaimIsNotShownBeforeItIsKnownWhatItHas", edits: []edit{
		{"		if protocol.Carried(c, cluster.UID) || owns", "		if owns"},
	}},
	{name: "a ledger that was moved speaks of Machines that are no more", test: "TestALedgerThatWasMovedSpeaksOfMachinesByTheirNames", edits: []edit{
		{"	if !s.moved() {\n		return\n	}\n	l := s.Ledger.Clone()\n", "	if true {\n		return\n	}\n	l := s.Ledger.Clone()\n"},
	}},
	{name: "a Machine that lives again waits for a generation that is no more", test: "TestALedgerThatWasMovedSpeaksOfMachinesByTheirNames", edits: []edit{
		{"			r.Decremented, r.Generation = !Alive(m), s.Deployment.Generation\n", "			r.Decremented = !Alive(m)\n"},
	}},
	{name: "a Machine that lives again has no replica", test: "TestALedgerThatWasMovedSpeaksOfMachinesByTheirNames", edits: []edit{
		{"			r.Decremented, r.Generation = !Alive(m), s.Deployment.Generation\n", "			r.Generation = s.Deployment.Generation\n"},
	}},
	{name: "a claim that lost its status in a move asks for a Machine", test: "TestAClaimThatWasMovedIsKnownByItsMachineOrByTheLedger", edits: []edit{
		{"	return Carried(c, s.ClusterUID) || c.Status", "	return c.Status"},
	}},
	{name: "a release that was under way is forgotten by a move", test: "TestAReleaseGoesOnAfterAMove", edits: []edit{
		{"	case release.Claim == c.Spec.ClaimID && (s.moved() || !Alive(m)):\n", "	case release.Claim == c.Spec.ClaimID && !Alive(m):\n"},
	}},
	{name: "a release is forgotten with its claim's status", test: "TestAClaimThatLostItsStatusWhileItsMachineIsReleasedIsReleasedStill", edits: []edit{
		{"	case release.Claim == c.Spec.ClaimID && (s.moved() || !Alive(m)):\n", "	case release.Claim == c.Spec.ClaimID && s.moved():\n"},
	}},
	{name: "a claim of a deleted node group that lost its status ends before its Machine", test: "TestAClaimOfAGroupThatIsGoneEndsWithTheMachineThatCarriesItsLabel", edits: []edit{
		{"		case m == nil && s.labelled(c.Spec.ClaimID) != nil: // its status was lost\n", "		case m == nil && s.labelled(c.Spec.ClaimID) != nil && Alive(s.labelled(c.Spec.ClaimID)):\n"},
	}},
	{name: "a MachineSet is lowered twice for one Machine, before and after a move", test: "TestAMachineSetThatWasLoweredBeforeAMoveIsNotLoweredAgain", edits: []edit{
		{"			r.LoweredAs = uid\n", "			_ = r.LoweredAs\n"},
	}},
	{name: "spares go before the holder has said who lives", test: "TestNothingIsOrderedAndNothingRemovedBeforeTheHolderHasSaidWhoLives", edits: []edit{
		{"	case s.moved() && !s.Synced && ", "	case s.moved() && false && "},
	}},
	{name: "a claim that is made again from its Machine is refused", test: "TestAClaimThatWasLeftBehindIsMadeAgainWhileTheHolderIsWaitedFor", edits: []edit{
		{"		case !carried && !owns && !s.entered(c):\n", "		case !carried && !s.entered(c):\n"},
	}},
	{name: "an ended claim is forgotten while clusterctl copies it", test: "TestAClaimIsNotForgottenWhileItsClusterIsMoved", edits: []edit{
		{"	if paused, err := t.paused(ctx, cluster); err != nil || paused {\n", "	if paused, err := t.paused(ctx, cluster); err != nil || paused && false {\n"},
	}},
	{name: "a claim that was moved is collected", test: "TestAClaimThatWasMovedIsNotCollectedAndGoesWithItsCluster", edits: []edit{
		{"	if a.Remade && a.Machine.Spec.ProviderID != \"\" && ", "	if a.Remade && a.Machine.Name == \"\" && "},
	}},
	{name: "claims are listed without the Machines that they have", test: "TestClaimsAreNotListedWithoutTheMachinesThatTheyHave", edits: []edit{
		{" || owns && c.Status.Phase == \"\" {\n", " || owns && c.Status.Phase == v1alpha1.PhaseEnded {\n"},
	}},
	{name: "a group that is deleted waits for the holder", test: "TestAGroupThatIsDeletedWaitsForNoHolder", edits: []edit{
		{"	case s.deleted():\n		return nil // all of it goes, whoever lives\n", ""},
	}},
	{name: "a claim that was moved goes on to its next candidate", test: "TestAClaimThatWasMovedDoesNotMoveOn", edits: []edit{
		{"	if err := e.known(ctx, a.Claim); errors.Is(err, ErrRestoring) {\n", "	if err := e.known(ctx, a.Claim); errors.Is(err, ErrUnknownCluster) {\n"},
		{"	} else if err != nil {\n		return err\n	}\n	next, err := e.nextCandidate(ctx, a.Claim)\n", "	}\n	next, err := e.nextCandidate(ctx, a.Claim)\n"},
	}},
}
