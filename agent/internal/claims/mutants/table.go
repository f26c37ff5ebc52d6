package main

// mutants are the deliberate breakages. Each leaves one rule of the protocol out; the rules R1 to R5 are those of the package's
// documentation.
var mutants = []mutant{
	// The anchor: a claim belongs to one node group.
	{name: "no anchor: each group has an object for the claim", smoke: true, edits: []edit{
		{"engine.go", "v1alpha1.ObjectName(r.Cluster, r.ID),\n", "v1alpha1.ObjectName(r.Cluster, r.ID+nodeGroup),\n"},
	}},
	{name: "anchor not followed: a repeated call moves the claim", edits: []edit{
		{
			"engine.go",
			"	case v1alpha1.PhaseBound:\n		return c, nil\n	case v1alpha1.PhasePending:\n",
			"	case v1alpha1.PhaseBound, v1alpha1.PhasePending:\n" +
				"		moved := c.DeepCopy()\n" +
				"		moved.Spec.NodeGroup = c.Spec.Candidates[len(c.Spec.Candidates)-1]\n" +
				"		moved.Labels[v1alpha1.NodeGroupLabel] = moved.Spec.NodeGroup\n" +
				"		_ = e.Client.Update(ctx, moved)\n" +
				"		if true {\n			return e.enter(ctx, moved)\n		}\n",
		},
	}},
	{name: "an ended id is used again", edits: []edit{
		{
			"engine.go", "	case v1alpha1.PhaseEnded, v1alpha1.PhaseReleasing:\n		return nil, ended(c)\n",
			"	case v1alpha1.PhaseEnded, v1alpha1.PhaseReleasing:\n		_ = e.Client.Delete(ctx, c)\n		return nil, ended(c)\n",
		},
	}},
	{name: "tombstone dropped early", smoke: true, edits: []edit{
		{"tombstone.go", "kept - t.Clock.Since(c.Status.EndedAt.Time)", "min(kept, time.Second) - t.Clock.Since(c.Status.EndedAt.Time)"},
	}},
	{name: "no tombstone for an unknown claim", edits: []edit{
		{
			"tombstone.go", "	if err := e.Client.Create(ctx, c); apierrors.IsAlreadyExists(err) {",
			"	return c, nil\n	if err := e.Client.Create(ctx, c); apierrors.IsAlreadyExists(err) {",
		},
	}},

	// The ledger: a compare-and-swap.
	{name: "no seq: two ledgers of the same content are one", edits: []edit{
		{"write.go", "		next.Seq = s.ledger.Seq + 1\n", "		next.Seq = s.ledger.Seq\n"},
	}},
	{name: "the ledger is written without its test", edits: []edit{
		{
			"write.go", "		ops = append(ops, test(annotationPath(v1alpha1.LedgerAnnotation), s.md.Annotations[v1alpha1.LedgerAnnotation]))\n", "",
		},
	}},
	{name: "replicas are written without their test", edits: []edit{
		{"write.go", "	ops = append(ops, test(\"/spec/replicas\", s.group.Replicas))\n", ""},
	}},
	{name: "give-back without the generation test", edits: []edit{
		{"write.go", "		ops = append(ops, test(\"/metadata/generation\", s.md.Generation))\n", ""},
	}},
	{name: "floor inferred from stale Machines", smoke: true, edits: []edit{
		{
			"decide.go", "	next.Floor = max(0, next.Floor+s.group.Replicas-next.LastReplicas)\n",
			"	next.Floor = 0\n" +
				"	for _, m := range s.machines {\n" +
				"		if s.orphaned(claimOf(m)) && !next.promised()[m.UID] {\n" +
				"			next.Floor++\n" +
				"		}\n" +
				"	}\n" +
				"	next.Floor = min(max(0, next.Floor-clamp(next.unnamed())), s.group.Replicas)\n",
		},
	}},
	{name: "a human's raise is not the floor's", edits: []edit{
		{
			"decide.go", "	next.Floor = max(0, next.Floor+s.group.Replicas-next.LastReplicas)\n",
			"	next.Floor = max(0, next.Floor+min(0, s.group.Replicas-next.LastReplicas))\n",
		},
	}},
	{name: "a human's lowering is not the floor's", edits: []edit{
		{
			"decide.go", "	next.Floor = max(0, next.Floor+s.group.Replicas-next.LastReplicas)\n",
			"	next.Floor = max(0, next.Floor+max(0, s.group.Replicas-next.LastReplicas))\n",
		},
	}},
	{name: "a lost ledger is rebuilt without the claims that wait", edits: []edit{
		{"decide.go", "		entered := c.Status.Phase == v1alpha1.PhasePending || ", "		entered := "},
	}},
	{name: "a shortage is not made good", edits: []edit{
		{"decide.go", "			d.replicas, d.urgent = raised, true\n", "			d.urgent = true\n"},
	}},
	{name: "max size ignored when a claim is entered", smoke: true, edits: []edit{
		{"decide.go", "		case s.group.Max == nil || size < *s.group.Max:\n", "		case true || size > 0:\n"},
	}},
	{name: "max size ignored when a shortage is made good", edits: []edit{
		{"decide.go", "			raised = min(raised, max(d.replicas, *s.group.Max))\n", ""},
	}},
	{name: "min size ignored", edits: []edit{
		{"decide.go", "	return max(next.Floor, next.Min)\n", "	return next.Floor\n"},
	}},

	// The ledger's budget.
	{name: "the ledger has no budget", test: "TestNoLedgerOutgrowsItsAnnotation", edits: []edit{
		{"budget.go", "	if size > b.left || size > *share {\n", "	if size < 0 {\n"},
	}},
	{name: "an entry counts with its present size", test: "TestNoLedgerOutgrowsItsAnnotation", edits: []edit{
		{"budget.go", " + max(longestName, len(named.Machine)) + max(uidLength, len(named.UID))\n", " + len(named.Machine)\n"},
		{"budget.go", "func (s *snapshot) newBudget(l *Ledger, limit int) *budget {\n", "func (s *snapshot) newBudget(l *Ledger, limit int) *budget {\n	limit = math.MaxInt\n"},
		{"budget.go", "	\"maps\"\n", "	\"maps\"\n	\"math\"\n"},
	}},
	{name: "the annotations beside the ledger are not counted", test: "TestNoLedgerOutgrowsItsAnnotation", edits: []edit{
		{"budget.go", "len(v1alpha1.LedgerAnnotation) - beside\n", "len(v1alpha1.LedgerAnnotation) - 0*beside\n"},
	}},
	{name: "a claim overtakes those that wait for room in the ledger", test: "TestWhatTheLedgerHasNoRoomForWaitsInOrder", edits: []edit{
		{"budget.go", "		*share = 0\n", ""},
	}},
	{name: "releases keep claims out of the ledger", test: "TestWhatTheLedgerHasNoRoomForWaitsInOrder", edits: []edit{
		{"budget.go", "	share := limit / 4 * 3\n", "	share := limit\n"},
	}},
	{name: "claims that wait for room in the ledger are not counted at the max size", test: "TestWhatTheLedgerHasNoRoomForWaitsInOrder", edits: []edit{
		{"decide.go", "			size++\n", "			size = d.replicas\n"},
	}},
	{name: "spares go while claims wait for room in the ledger", test: "TestWhatTheLedgerHasNoRoomForWaitsInOrder", edits: []edit{
		{"decide.go", "	waits := (next.unnamed() > 0 || len(d.queued) > 0) && d.unmet == 0\n", "	waits := next.unnamed() > 0 && d.unmet == 0\n"},
	}},
	{name: "a call whose claim waits for room in the ledger is answered", test: "TestACallWaitsUntilTheLedgerHasRoomForItsClaim", edits: []edit{
		{"group.go", "		if err == nil && g.queued[id] {\n", "		if err != nil && g.queued[id] {\n"},
	}},
	{name: "a refused write is a lost race", test: "TestALedgerThatTheHubRefusesIsNotRetriedAsALostRace", edits: []edit{
		{"write.go", "	return (details == nil || len(details.Causes) == 0) && !denied(status)\n", "	return details == nil || !denied(nil) || true\n"},
		{"write.go", "	message := err.Status().Message\n", "	if err == nil {\n		return false\n	}\n	message := err.Status().Message\n"},
	}},
	{name: "a refused ledger holds everything up", test: "TestARefusedLedgerHoldsUpNothingElse", edits: []edit{
		{"group.go", "				refused = err // what the ledger permits as it is goes on\n", "				return g.retry(d, 0), err\n"},
	}},
	{name: "a MachineSet forgets Machines that still count", test: "TestAMachineSetForgetsTheMachinesThatWereReleasedLongAgo", edits: []edit{
		{"write.go", "		if slices.Contains(a.counts, uid) {\n", "		if slices.Contains(a.uids, uid) {\n"},
	}},

	// Rule R1: the ledger first, all else live after it.
	{name: "R1: Machines before the ledger", edits: []edit{
		{
			"group.go", "	var md clusterv1.MachineDeployment\n	if err := e.reader(from).Get(ctx, key, &md); apierrors.IsNotFound(err) {\n",
			"	var md clusterv1.MachineDeployment\n" +
				"	var early clusterv1.MachineList\n" +
				"	if err := e.reader(from).List(ctx, &early, client.InNamespace(key.Namespace), e.inGroup(from, clusterv1.MachineDeploymentNameLabel, key.Name)); err != nil {\n" +
				"		return nil, err\n" +
				"	}\n" +
				"	if err := e.reader(from).Get(ctx, key, &md); apierrors.IsNotFound(err) {\n",
		},
		{
			"group.go", "	if err := e.readParts(ctx, from, key, s); err != nil {\n		return nil, err\n	}\n",
			"	if err := e.readParts(ctx, from, key, s); err != nil {\n		return nil, err\n	}\n" +
				"	s.machines = nil\n" +
				"	for i := range early.Items {\n" +
				"		s.machines = append(s.machines, &early.Items[i])\n" +
				"	}\n",
		},
	}},
	{name: "R1: claims before the ledger", edits: []edit{
		{
			"group.go", "	var md clusterv1.MachineDeployment\n	if err := e.reader(from).Get(ctx, key, &md); apierrors.IsNotFound(err) {\n",
			"	var md clusterv1.MachineDeployment\n" +
				"	var early v1alpha1.MachineClaimList\n" +
				"	if err := e.reader(from).List(ctx, &early, client.InNamespace(key.Namespace), e.inGroup(from, v1alpha1.NodeGroupLabel, key.Name)); err != nil {\n" +
				"		return nil, err\n" +
				"	}\n" +
				"	if err := e.reader(from).Get(ctx, key, &md); apierrors.IsNotFound(err) {\n",
		},
		{
			"group.go", "	if err := e.readParts(ctx, from, key, s); err != nil {\n		return nil, err\n	}\n",
			"	if err := e.readParts(ctx, from, key, s); err != nil {\n		return nil, err\n	}\n" +
				"	s.claims = nil\n" +
				"	for i := range early.Items {\n" +
				"		s.claims = append(s.claims, &early.Items[i])\n" +
				"	}\n",
		},
	}},
	{name: "R1: claims from the cache", edits: []edit{
		{"group.go", "	if err := e.reader(from).List(ctx, &claims, options...); err != nil {\n", "	if err := e.Client.List(ctx, &claims, options...); err != nil {\n"},
	}},
	{name: "R1: Machines from the cache", edits: []edit{
		{
			"group.go", "	if err := e.reader(from).List(ctx, &machines, client.InNamespace(key.Namespace), selector); err != nil {\n",
			"	if err := e.Client.List(ctx, &machines, client.InNamespace(key.Namespace), selector); err != nil {\n",
		},
	}},
	{name: "R1: MachineSets from the cache", edits: []edit{
		{
			"group.go", "	if err := e.reader(from).List(ctx, &sets, client.InNamespace(key.Namespace), selector); err != nil {\n",
			"	if err := e.Client.List(ctx, &sets, client.InNamespace(key.Namespace), selector); err != nil {\n",
		},
	}},

	// Rule R2: the object, then the ledger live, then the patch of exactly that object.
	{name: "R2: the ledger is not read again before other writes", edits: []edit{
		{"group.go", "		} else if !same {\n", "		} else if false && !same {\n"},
	}},
	{name: "R2: Machines are patched whatever became of them", edits: []edit{
		{
			"write.go", "	ops := []operation{test(\"/metadata/uid\", before.UID)}\n",
			"	if true {\n		return e.Client.Patch(ctx, after, client.MergeFrom(before), fieldOwner)\n	}\n" +
				"	ops := []operation{test(\"/metadata/uid\", before.UID)}\n",
		},
		{
			"write.go", "	return e.Client.Patch(ctx, m, client.MergeFromWithOptions(a.machine, client.MergeFromWithOptimisticLock{}), fieldOwner)\n",
			"	return e.Client.Patch(ctx, m, client.MergeFrom(a.machine), fieldOwner)\n",
		},
	}},
	{name: "binding without the unset check", edits: []edit{
		{
			"write.go", "	if err := e.patchMachine(ctx, machine, m); err != nil {\n		return err\n	}\n	observeBound",
			"	if err := e.Client.Patch(ctx, m, client.MergeFrom(machine), fieldOwner); err != nil {\n		return err\n	}\n	observeBound",
		},
		{
			"decide.go", "	case named.UID != \"\" && m != nil && alive(m) && !held(m) && claimOf(m) == \"\" && !had:\n		d.actions = append(d.actions, action{kind: bind",
			"	case named.UID != \"\" && m != nil && alive(m) && !held(m) && (!had || true):\n		d.actions = append(d.actions, action{kind: bind",
		},
	}},

	// Rule R3: not in the cache is never gone.
	{name: "R3: a Machine that the cache lacks is gone", edits: []edit{
		{
			"group.go", "	if err := e.reader(from).List(ctx, &machines, client.InNamespace(key.Namespace), selector); err != nil {\n",
			"	if err := e.Client.List(ctx, &machines, client.InNamespace(key.Namespace), selector); err != nil {\n",
		},
		{"group.go", "		err := e.Reader.Get(ctx, types.NamespacedName{Namespace: key.Namespace, Name: ref.Name}, &m)\n", "		err := e.Client.Get(ctx, types.NamespacedName{Namespace: key.Namespace, Name: ref.Name}, &m)\n"},
	}},
	{name: "R3: a claim that the cache lacks is gone", edits: []edit{
		{
			"engine.go", "	if err := e.Reader.Get(ctx, key.object(), &c); apierrors.IsNotFound(err) {\n		return nil, ErrNotFound\n",
			"	if err := e.Client.Get(ctx, key.object(), &c); apierrors.IsNotFound(err) {\n		return nil, ErrNotFound\n",
		},
	}},
	{name: "R3: a Cluster that the cache lacks is gone", edits: []edit{
		{"engine.go", "		err = e.Reader.Get(ctx, key, object)\n", ""},
	}},

	// Rule R4: "released" only when it is.
	{name: "R4: a claim ends before its instance is gone", edits: []edit{
		{
			"decide.go", "(labelled == nil || !alive(labelled) && deletionCompleted(labelled)) && (m == nil || alive(m) || deletionCompleted(m)):\n",
			"(labelled == nil || !alive(labelled)):\n",
		},
	}},
	{name: "R4: a claim ends before its Machine is deleted", edits: []edit{
		{
			"decide.go", "	case !entered && (labelled == nil || !alive(labelled) && deletionCompleted(labelled)) && (m == nil || alive(m) || deletionCompleted(m)):\n",
			"	case !entered:\n",
		},
	}},
	{name: "R4: a claim ends while its Machine dies without its label", test: "TestAgreement", edits: []edit{
		{"decide.go", " && (m == nil || alive(m) || deletionCompleted(m)):\n", ":\n"},
	}},

	// Rule R5: wait for what the own write made.
	{name: "R5: a Machine is let go before the lowering is observed", edits: []edit{
		{"decide.go", "		case recorded && r.GivenBack && ours && s.carriedThrough(r.Generation):\n", "		case recorded && r.GivenBack && ours:\n"},
	}},
	{name: "R5: numbers that look right instead of the generation", edits: []edit{
		{"decide.go", "		case recorded && r.GivenBack && ours && s.carriedThrough(r.Generation):\n", "		case recorded && r.GivenBack && ours && s.observed(0):\n"},
	}},
	{name: "R5: only the MachineDeployment is waited for", edits: []edit{
		{
			"snapshot.go", "	return !slices.ContainsFunc(s.sets, func(set *clusterv1.MachineSet) bool { return set.Status.ObservedGeneration < set.Generation })\n",
			"	return true\n",
		},
	}},

	// Binding.
	{name: "label before Bound", smoke: true, edits: []edit{
		{
			"write.go", "	if err := e.Client.Status().Update(ctx, c); err != nil {\n		return err\n	}\n	return e.label(ctx, c, a.machine)\n",
			"	if err := e.label(ctx, c, a.machine); err != nil {\n		return err\n	}\n	return e.Client.Status().Update(ctx, c)\n",
		},
	}},
	{name: "a dead Machine stays named", edits: []edit{
		{"decide.go", "	s.unname(next)\n", ""},
	}},
	{name: "a Machine is named twice", edits: []edit{
		{"decide.go", "		if !alive(m) || held(m) || promised[m.UID] {\n", "		if !alive(m) || held(m) || promised[\"\"] {\n"},
	}},
	{name: "a Node in use is given to a claim", edits: []edit{
		{"decide.go", "	return s.nodeless(m) || m.Spec.ProviderID != \"\" && !s.registered(m) && s.unregistered(m.Spec.ProviderID)\n", "	return true\n"},
	}},
	{name: "the floor's Machines are given to claims", edits: []edit{
		{"decide.go", "	give := len(free) - int(s.floor(next))\n", "	give := len(free)\n"},
	}},
	{name: "a claim whose Machine joined too early waits for ever", edits: []edit{
		{"decide.go", "	s.coverShortage(d, next)\n", ""},
	}},
	{name: "an entry is dropped while its Machine has no label", edits: []edit{
		{"decide.go", "			case claimOf(promised) == id:\n				drop(id, named)\n", "			default:\n				drop(id, named)\n"},
	}},

	// Cancelling and handing over.
	{name: "cancel ignores a named Machine", edits: []edit{
		{
			"decide.go", "	case m != nil && alive(m) && entered && named.UID == m.UID && claimOf(m) == \"\" && !held(m):\n		// The label first",
			"	case m != nil && alive(m) && entered && named.UID == m.UID && claimOf(m) == \"\" && !held(m):\n		d.end(c, ReasonCancelled, \"\")\n	case false:\n		// The label first",
		},
	}},
	{name: "replicas lowered at cancel", edits: []edit{
		{
			"decide.go", "	s.dropEntries(next)\n",
			"	before := len(next.Pending)\n" +
				"	s.dropEntries(next)\n" +
				"	for id := range s.byID {\n" +
				"		if c := s.claim(id); before > len(next.Pending) && c.Status.Phase == v1alpha1.PhaseReleasing && c.Status.Machine == nil && d.replicas > 0 {\n" +
				"			before--\n" +
				"			d.replicas--\n" +
				"		}\n" +
				"	}\n",
		},
	}},
	{name: "a Machine with a Node is handed over", edits: []edit{
		{"decide.go", "	if !alive(m) || held(m) || !s.nodeless(m) || outdated(m) || s.hopeless(m) {\n		return false\n	}\n	if c :=", "	if !alive(m) || held(m) || outdated(m) || s.hopeless(m) {\n		return false\n	}\n	if c :="},
	}},
	{name: "unbound before its entry is dropped", edits: []edit{
		{"decide.go", "	case m != nil && alive(m) && !entered && claimOf(m) == id && s.handsOver(m)", "	case m != nil && alive(m) && claimOf(m) == id && s.handsOver(m)"},
	}},

	// Releasing one Machine.
	{name: "spare handed out while its release runs", edits: []edit{
		{"decide.go", "		if _, releasing := next.Releasing[m.UID]; releasing {\n			continue\n		}\n		free = append(free, m)\n", "		free = append(free, m)\n"},
	}},
	{name: "replicas lowered before the deletion is complete", edits: []edit{
		{"decide.go", "		case !r.GivenBack && (deletionCompleted(m) || r.Hook && waitsForHook(m)):\n", "		case !r.GivenBack && !alive(m):\n"},
	}},
	{name: "replicas lowered before the Machine is deleted", edits: []edit{
		{"decide.go", "		case !r.GivenBack && (deletionCompleted(m) || r.Hook && waitsForHook(m)):\n", "		case !r.GivenBack:\n"},
	}},
	{name: "a Machine that somebody else removed is given back", edits: []edit{
		{
			"decide.go", "			if r.GivenBack || r.Set == \"\" {\n",
			"			if !r.GivenBack && r.Set == \"\" && d.replicas > 0 {\n				d.replicas--\n			}\n			if r.GivenBack || r.Set == \"\" {\n",
		},
	}},
	{name: "deleted without our finalizer", edits: []edit{
		{"write.go", "	controllerutil.AddFinalizer(m, v1alpha1.ReleaseFinalizer)\n", ""},
	}},
	{name: "a replica is given back twice", edits: []edit{
		{"decide.go", "		case !r.GivenBack && (deletionCompleted(m) || r.Hook && waitsForHook(m)):\n", "		case deletionCompleted(m) || r.Hook && waitsForHook(m):\n"},
	}},
	{name: "a Machine is bound before the claim that hands it over has ended", edits: []edit{
		{"decide.go", " && claimOf(m) == \"\" && !had:\n", " && claimOf(m) == \"\" && (!had || true):\n"},
	}},
	{name: "an edited ledger's release is believed", edits: []edit{
		{"decide.go", "		if c := s.claim(claimOf(m)); c == nil || c.CurrentPhase() != v1alpha1.PhaseReleasing {\n			delete(next.Releasing, uid)\n", "		if false {\n			delete(next.Releasing, uid)\n"},
		{"decide.go", "	return c != nil && c.CurrentPhase() == v1alpha1.PhaseReleasing\n", "	return true || c != nil\n"},
	}},

	// Several MachineSets.
	{name: "no paused variant", edits: []edit{
		{"decide.go", "	sole := len(active) == 1 && !slices", "	if len(active) == 0 {\n		return\n	}\n	sole := len(active) > 0 || !slices"},
	}},
	{name: "paused step not repeatable", edits: []edit{
		{
			"write.go", "	metav1.SetMetaDataAnnotation(&set.ObjectMeta, v1alpha1.ReleasedAnnotation, joinUIDs(uids))\n",
			"	if err := e.patchSet(ctx, a.set, set.DeepCopy()); err != nil {\n		return err\n	}\n" +
				"	if err := e.Client.Get(ctx, client.ObjectKeyFromObject(set), a.set); err != nil {\n		return err\n	}\n" +
				"	set = a.set.DeepCopy()\n" +
				"	metav1.SetMetaDataAnnotation(&set.ObjectMeta, v1alpha1.ReleasedAnnotation, joinUIDs(uids))\n",
		},
	}},
	{name: "recovery merely un-pauses", test: "TestAPausedStepThatSomebodyLeftIsCompleted", edits: []edit{
		{"group.go", "	spareSince time.Time\n	lastQuiet", "	recovered  bool\n	spareSince time.Time\n	lastQuiet"},
		{
			"group.go", "		s.spareSince = g.spareSince\n		d := e.decide(s)\n		g.noteSpare(s, d)\n",
			"		s.spareSince = g.spareSince\n		d := e.decide(s)\n" +
				"		if !g.recovered && s.ledger != nil && s.md.Annotations[clusterv1.PausedAnnotation] == v1alpha1.PausedByAgent {\n" +
				"			d = &decision{ledger: s.ledger.clone(), replicas: s.group.Replicas, pause: pauseRemove, urgent: true}\n" +
				"			for uid, r := range d.ledger.Releasing {\n" +
				"				if !r.GivenBack {\n" +
				"					r.Set = \"\"\n" +
				"					d.ledger.Releasing[uid] = r\n" +
				"				}\n" +
				"			}\n" +
				"		}\n" +
				"		g.recovered = true\n" +
				"		g.noteSpare(s, d)\n",
		},
	}},
	{name: "a MachineSet is lowered before the pause is observed", edits: []edit{
		{"decide.go", "	case ours && isPaused(s.md.Status.Conditions) && s.setsLowered(d, next, begun):\n", "	case ours && s.setsLowered(d, next, begun):\n"},
	}},
	{name: "a lowered MachineSet is not waited for", edits: []edit{
		{"decide.go", "		case set != nil && set.Status.ObservedGeneration < set.Generation:\n", "		case set != nil && set.Status.ObservedGeneration < 0:\n"},
	}},

	// Machines that nobody claims.
	{name: "unbound surge Machine released during a rollout", edits: []edit{
		{"decide.go", "	if s.rollingOut() || !observed && len(gone) == 0 {\n", "	if false {\n"},
		{"decide.go", "	case waits || !observed:\n", "	case waits || !observed && false:\n"},
	}},
	{name: "the floor's Machines are released as spares", edits: []edit{
		{"decide.go", "	surplus := min(len(free)-int(s.floor(next)), int(spare))\n", "	surplus := min(len(free), int(spare)+1)\n"},
		{"decide.go", "	if spare <= 0 || !s.mayShrink(next) {\n		return spare\n	}\n	free := s.free(next)\n", "	free := s.free(next)\n"},
		{"decide.go", "	if waits && len(gone) == 0 || !s.graceOver(d) {\n", "	if next.unnamed() > 0 || !s.graceOver(d) {\n"},
	}},
	{name: "spares are never released", edits: []edit{
		{"decide.go", "	spare = s.releaseSpare(d, next, spare)\n", ""},
	}},
	{name: "blocked replicas are never given back", edits: []edit{
		{"decide.go", "	spare = s.shrink(d, next, spare)\n", ""},
	}},
	{name: "blocked spares are counted down without a pause", edits: []edit{
		{
			"decide.go", "	if next.Shrink == nil {\n		for _, set",
			"	if may && s.graceOver(d) {\n		d.replicas -= missing\n		d.urgent = true\n		return spare - missing\n	}\n	if next.Shrink == nil {\n		for _, set",
		},
	}},
	{name: "blocked spares are counted before the pause is observed", edits: []edit{
		{"decide.go", "		if isPaused(set.Status.Conditions) && s.assigned() {\n", "		if s.assigned() {\n"},
	}},
	{name: "a MachineSet is unpaused before it was lowered", edits: []edit{
		{
			"decide.go", "		if overtaken || s.allLowered() && d.replicas == s.group.Replicas {\n",
			"		if overtaken || d.replicas >= 0 {\n",
		},
	}},
	{name: "blocked spares are counted down while a template change is unseen", test: "TestSparesThatNeverCameAreCountedOnceTheTemplateIsSeen", edits: []edit{
		{"decide.go", "		if isPaused(set.Status.Conditions) && s.assigned() {\n", "		if isPaused(set.Status.Conditions) {\n"},
	}},
	{name: "a MachineSet stays paused until it was raised as well", test: "TestAgreement", edits: []edit{
		{"decide.go", "		if overtaken || s.allLowered() && d.replicas == s.group.Replicas {\n", "		if overtaken || s.assigned() && d.replicas == s.group.Replicas {\n"},
	}},
	{name: "a MachineSet stays paused while a rollout waits for it", test: "TestAMachineSetThatARolloutWaitsForIsUnpaused", edits: []edit{
		{"decide.go", " || !s.onDelete() && s.newest() != set\n", "\n"},
	}},
	{name: "a MachineSet is unpaused by an agent whose grace period is not over", test: "TestAgreement", edits: []edit{
		{"decide.go", "	may = may && active[0] == set\n", "	may = may && active[0] == set && s.graceOver(d)\n"},
	}},
	{name: "a MachineSet that nobody knows why is paused stays so", test: "TestAgreement", edits: []edit{
		{"decide.go", "				next.Shrink = &Shrink{Set: set.Name, Done: true} // nobody knows why\n				return spare\n", ""},
	}},

	{name: "a MachineDeployment is paused while its MachineSet is", test: "TestOnePauseAtATime", edits: []edit{
		{"decide.go", "		if !paused && next.Shrink == nil {\n", "		if !paused {\n"},
	}},
	{name: "a MachineSet is paused while its MachineDeployment is", test: "TestOnePauseAtATime", edits: []edit{
		{"decide.go", " && !marked(active[0]) && !lowersUnderPause(next) {\n", " && !marked(active[0]) {\n"},
	}},

	// What was lost with the ledger.
	{name: "a lost ledger counts Machines whose replica was given back", test: "TestAgreement", edits: []edit{
		{"decide.go", "			back := deletionCompleted(m) || waitsForHook(m)\n", "			back := false\n"},
	}},
	{name: "a lost ledger counts a Machine that our hook was taken off", test: "TestAgreement", edits: []edit{
		{"decide.go", "		case !alive(m) && !s.keeps(claimOf(m)):\n", "		case !alive(m) && claimOf(m) == \"\":\n"},
	}},
	{name: "a lost ledger counts a Machine that was handed over twice", test: "TestAgreement", edits: []edit{
		{"decide.go", " || c.Status.Phase == v1alpha1.PhaseBound && c.Status.Machine != nil\n", " || c.Status.Machine != nil\n"},
	}},
	{name: "a Machine that no ledger knows goes before its lowering was seen", test: "TestAgreement", edits: []edit{
		{"decide.go", "		case !recorded && stopped && s.carriedThrough(s.md.Generation):\n", "		case !recorded && stopped:\n"},
	}},
	{name: "a pause that no ledger knows stays", test: "TestAgreement", edits: []edit{
		{"decide.go", "	s.unpause(d, next)\n", ""},
	}},
	{name: "a replica that a rollout took is given back once more", test: "TestAgreement", edits: []edit{
		{"decide.go", "		begun = s.skipReplaced(d, next, begun)\n", ""},
	}},

	// Lost objects.
	{name: "a claim whose object was lost has no right any more", edits: []edit{
		{"decide.go", "	c := s.claim(claimID)\n	return c != nil && c.CurrentPhase() == v1alpha1.PhaseEnded\n", "	c := s.claim(claimID)\n	return c == nil || c.CurrentPhase() == v1alpha1.PhaseEnded\n"},
	}},
	{name: "a lost claim is made again without its holder", edits: []edit{
		{"write.go", "if len(validation.IsDNS1123Label(holder)) > 0 {\n", "if true {\n"},
	}},
	{name: "a claim that lost its status gets a second Machine", edits: []edit{
		{"decide.go", "		if _, entered := next.Pending[id]; entered || s.labelled(id) != nil {\n			continue // a claim", "		if _, entered := next.Pending[id]; entered {\n			continue // a claim"},
		{"decide.go", "owned != nil && alive(owned) {\n", "owned != nil && false {\n"},
	}},

	// Machines that are made again.
	{name: "a Machine that was being released and was made again stays for ever", test: "TestTheReleaseOfAMachineThatWasMadeAgainGoesOn", edits: []edit{
		{"decide.go", "		if !alive(m) || !held(m) || !s.orphaned(claimOf(m)) {\n", "		if true || !s.orphaned(claimOf(m)) {\n"},
	}},
	{name: "a Machine that was made again is released while its Cluster is paused", test: "TestTheReleaseOfAMachineThatWasMadeAgainGoesOn", edits: []edit{
		{"decide.go", "	if !s.mayShrink(next) {\n		return\n	}\n	for _, m := range s.machines {\n", "	for _, m := range s.machines {\n"},
	}},
	{name: "a claim's Machine that was made again stays marked", test: "TestAClaimKeepsItsMachineThatWasMadeAgainDuringItsRelease", edits: []edit{
		{"decide.go", "alive(m) && held(m) && s.boundTo(m) != nil:\n", "false && s.boundTo(m) != nil:\n"},
	}},
	{name: "a Machine is deleted though its finalizer was taken off", test: "TestAMachineThatIsKeptMeanwhileIsNotDeleted", edits: []edit{
		{"write.go", "		version = m.ResourceVersion // the patch did not test that the finalizer stays\n", "		_ = m\n"},
	}},

	{name: "claims of a MachineDeployment that is no more take the replicas of the next one", edits: []edit{
		{"snapshot.go", "c.Status.NodeGroupUID == s.md.UID || s.labelled(id) != nil {\n", "true || s.labelled(id) != nil {\n"},
	}},
	{name: "claims of a MachineDeployment that is no more freeze the next one", test: "TestAMachineDeploymentThatWasMadeAgainIsNotFrozen", edits: []edit{
		{"decide.go", " && c.Status.Machine != nil && !s.leftBehind(c) {\n", " && c.Status.Machine != nil {\n"},
	}},
	{name: "a restored claim does not know its MachineDeployment", test: "TestARestoredClaimKnowsItsMachineDeployment", edits: []edit{
		{"write.go", "	c.Status.NodeGroupUID = a.group\n", ""},
	}},
	{name: "a ledger is believed that came with a MachineDeployment that was made again", test: "TestAMachineDeploymentThatWasMadeAgainKeepsItsFloor", edits: []edit{
		{"group.go", "	if s.madeAgain() {\n", "	if s.madeAgain() && false {\n"},
	}},
	{name: "the ledger of a MachineDeployment that was moved is not believed", test: "TestAMachineDeploymentThatWasMovedKeepsItsLedger", edits: []edit{
		{"snapshot.go", "c.CurrentPhase() != v1alpha1.PhaseEnded && c.Status.NodeGroupUID == s.ledger.UID\n	})", "false\n	}) || true"},
	}},
	{name: "a ledger is written to a MachineDeployment that was made again", test: "TestWhatWasDecidedForAMachineDeploymentIsNotDoneToTheNextOne", edits: []edit{
		{"write.go", "		ops = append(ops, test(\"/metadata/uid\", s.md.UID)) // not one", "		_ = s.md.UID // not one"},
	}},
	{name: "what a ledger permitted is done after its MachineDeployment was made again", test: "TestWhatWasDecidedForAMachineDeploymentIsNotDoneToTheNextOne", edits: []edit{
		{"group.go", "	} else if err == nil && md.UID != read.UID {\n", "	} else if false && md.UID != read.UID {\n"},
	}},

	// Collection.
	{name: "collection without a token", edits: []edit{
		{"sync.go", "case !listed(c) || !c.CreationTimestamp.Add(e.CollectGrace).Before(taken.Time):", "case listed == nil:"},
	}},
	{name: "collection of claims that are as old as the token", edits: []edit{
		{
			"sync.go", "case !listed(c) || !c.CreationTimestamp.Add(e.CollectGrace).Before(taken.Time):",
			"case listed == nil || c.CreationTimestamp.Add(-e.CollectGrace).After(taken.Time):",
		},
	}},
	{name: "collection by the agent's clock alone", test: "TestAClaimMadeAfterTheListingIsNotCollectedByAClockThatIsAhead", edits: []edit{
		{"sync.go", "case !listed(c) || ", "case listed == nil || "},
	}},
	{name: "collection by the set of another cluster", edits: []edit{
		{"sync.go", "	case !s.speaksFor(c) && c.Spec.Spoke != \"\":\n", "	case false:\n"},
		{"sync.go", "	case !s.speaksFor(c):\n", "	case false:\n"},
		{"sync.go", "s.Spoke == \"\" || s.matched || s.own || s.others == \"\" {", "true {"},
	}},
	{name: "collection of claims whose Nodes were registered", edits: []edit{
		{"sync.go", "	case running || c.Status.NodeRegisteredAt != nil:\n", "	case running && false:\n"},
	}},
	{name: "any holder's claim is released", test: "TestAnotherHoldersClaimIsNeitherReleasedNorFollowed", edits: []edit{
		{"engine.go", "c.CurrentPhase() == v1alpha1.PhaseEnded || h(c.Spec.Holder) {\n", "c.CurrentPhase() == v1alpha1.PhaseEnded || true {\n"},
	}},

	{name: "a late Machine fails its claim", test: "TestALateMachineComesInTheEnd", edits: []edit{
		{"failure.go", "			verdict, reason = timeOut, ReasonLate\n", ""},
	}},
	{name: "a Machine that was handed over is late for its next claim at once", test: "TestALateMachineIsReleasedAndOneThatTakesSeveralDeadlinesFails", edits: []edit{
		{"failure.go", "at != nil && at.After(m.CreationTimestamp.Time)", "at != nil && at.Before(&m.CreationTimestamp)"},
	}},
	{name: "a late Machine is nobody's next", test: "TestALateMachineIsTheNextClaimsUntilItHasTakenSeveralDeadlines", edits: []edit{
		{"failure.go", "deadline > 0 && s.now.Sub(m.CreationTimestamp.Time) >= patience*deadline", "deadline > 0 && s.now.Sub(m.CreationTimestamp.Time) >= deadline"},
	}},
	{name: "a Machine that never comes is always late", test: "TestAMachineThatNeverComesIsGivenUpInTheEnd", edits: []edit{
		{"failure.go", "if why = s.late(d, since, given, what); why == \"\" {", "{"},
		{"failure.go", ">= patience*deadline {", "< 0 {"},
	}},
	{name: "a spare has the grace period of the one before it", test: "TestALateMachineComesInTheEnd", edits: []edit{
		{"controller.go", "if d.spare || s.seq() > g.spareSeq {", "if d.spare {"},
	}},
	{name: "a claim that is restored forgets why it failed", test: "TestARestoredClaimThatFailedKeepsItsReason", edits: []edit{
		{"write.go", "	if c.Status.FailedAt == nil { // why it failed matters more\n", "	{\n"},
	}},

	// MachineDeployments that are deleted.
	{name: "a deleted group's MachineSet stays paused for spares", test: "TestAGroupThatIsBeingDeletedIsNotKeptPaused", edits: []edit{
		{"decide.go", "overtaken := s.deleted() || ", "overtaken := "},
	}},
	{name: "a deleted group stays paused for a release", test: "TestAGroupThatIsBeingDeletedIsNotKeptPaused", edits: []edit{
		{"decide.go", "		if s.deleted() && r.Set != \"\" {\n", "		if s.deleted() && false {\n"},
	}},
	{name: "the Machines of a deleted group are held until their MachineSets act", test: "TestAMachineOfAGroupThatIsBeingDeletedIsLetGo", edits: []edit{
		{"decide.go", "		case stopped && s.deleted():\n", "		case stopped && false:\n"},
	}},
	{name: "a MachineSet that outlives its MachineDeployment stays paused", test: "TestAMachineSetThatWasLeftBehindIsUnpaused", edits: []edit{
		{"group.go", "		if set.Annotations[clusterv1.PausedAnnotation] == v1alpha1.PausedByAgent {\n", "		if false {\n"},
	}},

	// Machines that will not come, come too soon, or have no room.
	{name: "a Machine whose infrastructure is gone is waited for", test: "TestAMachineWithoutInfrastructureIsGivenUp", edits: []edit{
		{"failure.go", "s.now.Sub(since) >= missingAfter", "s.now.Sub(since) < 0"},
	}},
	{name: "a claim fails that a Machine is being given to", test: "TestAClaimDoesNotFailWhenAMachineIsBeingGivenToIt", edits: []edit{
		{"waiting.go", "	case d.ledger != nil && d.ledger.Pending[c.Spec.ClaimID].UID != \"\":\n", "	case false:\n"},
	}},
	{name: "an outage counts as waiting for a Machine", test: "TestADeadlineThatPassedWhileNoAgentLookedBeginsAnew", edits: []edit{
		{"waiting.go", "	case overdue > punctual:\n", "	case overdue > punctual*1e6:\n"},
	}},
	{name: "an agent that just started lets claims fail", test: "TestAnAgentThatJustStartedLetsNoClaimFail", edits: []edit{
		{"waiting.go", "	case overdue < 0 || unsettled > 0:\n", "	case overdue < 0:\n"},
	}},
	{name: "a pause counts as waiting for a Machine", test: "TestAClaimOfAPausedGroupDoesNotFail", edits: []edit{
		{"failure.go", "	if m != nil && hasNode(m) || s.paused(m) {\n", "	if m != nil && (hasNode(m) || s.paused(m)) {\n"},
	}},
	{name: "a claim is explained anew with each number", test: "TestExplanationsOfABlockedGroupAreFew", edits: []edit{
		{"waiting.go", "set.Name, oneLine(reasons))\n", "set.Name, oneLine(reasons)+c.Message)\n"},
		{"waiting.go", "left > 0 {\n", "left > explainEvery {\n"},
	}},
	{name: "writes that fail starve the others", test: "TestWritesThatFailDoNotStarveTheOthers", edits: []edit{
		{"group.go", "	at := g.skip % len(actions)\n", "	at := g.skip * 0\n"},
	}},
	{name: "a used-up quota is not looked at", test: "TestAGroupWhoseQuotaIsUsedUpTakesClaimsForSparesOnly", edits: []edit{
		{"engine.go", "if refusal != nil || err != nil || e.Quota == nil {", "if refusal != nil || err != nil || e.Quota != nil {"},
	}},
	{name: "Machines that join too soon are named as late as others", test: "TestAMachineIsNamedAtOnceWhereOthersJoinedTooSoon", edits: []edit{
		{"group.go", "	case s.unusable(d.ledger) > 0 && s.newlyNamed(d.ledger, false):", "	case s.unusable(d.ledger) > 0 && false:"},
	}},

	// Sizes that cannot be used, and other writers of replicas.
	{name: "Machines are removed while a size cannot be used", test: "TestAMistypedSizeRemovesNoMachine", edits: []edit{
		{"decide.go", "return s.group.MayShrink() && !next.Lowered", "return !s.group.Has(eligibility.Paused) && !next.Lowered"},
	}},
	{name: "an unusable min size is taken for none", test: "TestTheLastGoodMinSizeStaysInForce", edits: []edit{
		{"decide.go", "	if s.group.SizesUsable() {\n", "	if true {\n"},
	}},
	{name: "another reason hides a pause", test: "TestAPauseIsRespectedWhateverElseIsWrong", edits: []edit{
		{"decide.go", "return s.group.MayShrink() && !next.Lowered", "return (len(s.group.Refusals) != 1 || s.group.MayShrink()) && !next.Lowered"},
	}},
	{name: "replicas are raised where a topology sets them", test: "TestNothingIsRaisedWhereAnotherOwnerSetsTheReplicas", edits: []edit{
		{"decide.go", "	if spare < 0 && s.group.MayGrow() && !next.Lowered {\n", "	if spare < 0 && !next.Lowered {\n"},
	}},
	{name: "replicas that were lowered below what is claimed are raised again", test: "TestReplicasLoweredBelowWhatIsClaimedFreezeTheGroup", edits: []edit{
		{"decide.go", "	case s.group.Replicas < s.claimed(next) && (", "	case false && ("},
	}},
	{name: "a frozen group's replicas are raised", test: "TestReplicasLoweredBelowWhatIsClaimedFreezeTheGroup", edits: []edit{
		{"decide.go", "	if spare < 0 && s.group.MayGrow() && !next.Lowered {\n", "	if spare < 0 && s.group.MayGrow() {\n"},
	}},
	{name: "clearing a frozen group lowers the floor", test: "TestWhenAPersonClearsItTheUserHasTheFloorThatTheUserHad", edits: []edit{
		{"decide.go", "		next.Lowered, next.LastReplicas = false, s.group.Replicas\n		return next\n", "		next.Lowered = false\n"},
	}},

	// Nodes that Cluster API has not seen.
	{name: "a Machine whose Node is unseen is promised", test: "TestAMachineWhoseNodeIsUnseenIsNotPromised", edits: []edit{
		{"nodeless.go", "	return inspected(m)\n", "	return true\n"},
	}},
	{name: "Cluster API's wait for the Cluster is taken for a statement about the Node", test: "TestAMachineWhoseNodeIsUnseenIsNotHandedOver", edits: []edit{
		{"nodeless.go", " && strings.Contains(c.Message, m.Spec.ProviderID)", " && strings.Contains(c.Message, \"\")"},
	}},
	{name: "what the holder reported is forgotten", test: "TestAMachineWhoseNodeIsUnseenIsNotHandedOver", edits: []edit{
		{"nodeless.go", "	case hasNode(m), s.registered(m):\n", "	case hasNode(m):\n"},
	}},
	{name: "a drained Machine is handed over", test: "TestWhatWasDrainedIsNeverHandedOver", edits: []edit{
		{"decide.go", "(c.Status.FailedAt != nil || c.Status.Drained)", "c.Status.FailedAt != nil"},
	}},
	{name: "a node deadline needs no report of the holder", test: "TestANodeDeadlineNeedsBothStatements", edits: []edit{
		{"nodeless.go", "	case absent == nil || absent.Time.Before(due.Truncate(time.Second)) || s.now.Sub(absent.Time) > absenceLife:\n", "	case false && absent == nil:\n"},
	}},
	{name: "the time of a pause counts", test: "TestTheTimeOfAPauseDoesNotCount", edits: []edit{
		{"failure.go", "latest(boundAt(c, m), unpausedAt(m))", "latest(boundAt(c, m), boundAt(c, m))"},
	}},
	{name: "what was stated before a pause counts after it", test: "TestRightAfterAPauseNothingIsStated", edits: []edit{
		{"nodeless.go", "> unpauseSettles && s.now", "> 1000*unpauseSettles && s.now"},
	}},
}
