// Package onboarding connects workload clusters to the agent. It assigns an onboarding to a
// Cluster, and provides its spoke with a bootstrap certificate, with which the shim requests its
// first certificate.
package onboarding

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"
	"k8s.io/utils/clock"
	addonsv1 "sigs.k8s.io/cluster-api/api/addons/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/yaml"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/issuer"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/spokes"
)

// CAKey is the key of a secret that holds the authorities of the other side, in addition to
// [corev1.TLSCertKey] and [corev1.TLSPrivateKeyKey].
const CAKey = "ca.crt"

// idBytes makes IDs that cannot be guessed. An ID has twice as many hexadecimal digits and is the
// value of a label.
const idBytes = 16

// Options determine how a Cluster is onboarded.
type Options struct {
	// Cluster is the Cluster to onboard. REQUIRED.
	Cluster types.NamespacedName
	// Issuer is the secret in the hub with the agent's issuer, as tls.crt and tls.key. Its ca.crt
	// holds the authorities of the agent's own certificate; if it is missing, these are the issuer
	// itself. REQUIRED.
	Issuer types.NamespacedName
	// ServerCA replaces the authorities of the agent's own certificate from the secret. PEM.
	ServerCA []byte
	// TrustDomain is the agent's trust domain. REQUIRED.
	TrustDomain string
	// ValidFor is how long the bootstrap certificate is valid. REQUIRED.
	ValidFor time.Duration
	// Secret is the secret in the spoke that holds the bootstrap certificate for the shim.
	// REQUIRED.
	Secret types.NamespacedName
	// Again allows to onboard a Cluster that is already onboarded. The certificates of its previous
	// onboarding are rejected at once.
	Again bool
}

// Onboarding is a prepared onboarding. Nothing has been written yet.
type Onboarding struct {
	// Secret is the secret for the spoke.
	Secret *corev1.Secret
	// ID is the ID of the onboarding. Before is the ID of the current onboarding, which will end,
	// or empty if there is none.
	ID, Before string
	// NotAfter is when the bootstrap certificate expires.
	NotAfter time.Time
	// Connected reports whether the Cluster has no onboarding, and its shim is connected all the
	// same: Begin revokes the certificate that it uses, which was issued by other means.
	Connected bool

	cluster *clusterv1.Cluster
}

// Scheme returns a scheme with the types that onboarding reads and writes.
func Scheme() (*runtime.Scheme, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, clusterv1.AddToScheme, addonsv1.AddToScheme, v1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			return nil, fmt.Errorf("registering types: %w", err)
		}
	}
	return scheme, nil
}

// Prepare reads the Cluster and the issuer, and creates the bootstrap certificate. It writes
// nothing.
func Prepare(ctx context.Context, hub client.Reader, o Options, c clock.PassiveClock) (*Onboarding, error) {
	cluster := &clusterv1.Cluster{}
	if err := hub.Get(ctx, o.Cluster, cluster); apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("there is no Cluster %s in the hub", o.Cluster)
	} else if err != nil {
		return nil, fmt.Errorf("reading the Cluster %s: %w", o.Cluster, err)
	}
	before := cluster.Labels[v1alpha1.OnboardingLabel]
	if before == v1alpha1.Offboarded {
		before = ""
	}
	if before != "" && !o.Again {
		return nil, fmt.Errorf("the Cluster %s is already onboarded; --again creates a new onboarding, which revokes the current certificate of its "+
			"shim at once", o.Cluster)
	}
	chain, signer, serverCA, err := readIssuer(ctx, hub, o)
	if err != nil {
		return nil, err
	}
	random := make([]byte, idBytes)
	if _, err := rand.Read(random); err != nil {
		return nil, fmt.Errorf("generating the onboarding's id: %w", err)
	}
	onboarding := &Onboarding{ID: hex.EncodeToString(random), Before: before, cluster: cluster}
	if before == "" {
		var spoke v1alpha1.Spoke
		if err := hub.Get(ctx, o.Cluster, &spoke); client.IgnoreNotFound(err) != nil {
			return nil, fmt.Errorf("reading the Spoke %s: %w", o.Cluster, err)
		}
		onboarding.Connected = meta.IsStatusConditionTrue(spoke.Status.Conditions, v1alpha1.ConnectedCondition)
	}
	identity, err := authz.BootstrapIdentity(o.TrustDomain, authz.Onboarding{Cluster: o.Cluster, ID: onboarding.ID})
	if err != nil {
		return nil, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("making a key: %w", err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encoding a key: %w", err)
	}
	certificate, err := issuer.Sign(chain, signer, key.Public(), identity, c.Now(), o.ValidFor)
	if err != nil {
		return nil, err
	}
	onboarding.NotAfter = certificate.NotAfter
	onboarding.Secret = &corev1.Secret{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Secret"},
		ObjectMeta: metav1.ObjectMeta{Namespace: o.Secret.Namespace, Name: o.Secret.Name},
		Type:       corev1.SecretTypeTLS,
		Data: map[string][]byte{
			corev1.TLSCertKey:       certificate.Chain,
			corev1.TLSPrivateKeyKey: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}),
			CAKey:                   serverCA,
		},
	}
	return onboarding, nil
}

// readIssuer reads the secret with the agent's issuer. It returns the chain of the issuer's
// certificate and its key, and the authorities of the agent's own certificate.
func readIssuer(ctx context.Context, hub client.Reader, o Options) ([]*x509.Certificate, crypto.Signer, []byte, error) {
	fail := func(format string, args ...any) ([]*x509.Certificate, crypto.Signer, []byte, error) {
		return nil, nil, nil, fmt.Errorf("the issuer's secret %s: %w", o.Issuer, fmt.Errorf(format, args...))
	}
	var secret corev1.Secret
	if err := hub.Get(ctx, o.Issuer, &secret); apierrors.IsNotFound(err) {
		return fail("it does not exist; name the secret with the certificate and key that the agent has as --issuer-cert-file and " +
			"--issuer-key-file (--issuer-secret)")
	} else if err != nil {
		return fail("%w", err)
	}
	pair, err := tls.X509KeyPair(secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey])
	if err != nil {
		return fail("%s and %s cannot be used: %w", corev1.TLSCertKey, corev1.TLSPrivateKeyKey, err)
	}
	signer, ok := pair.PrivateKey.(crypto.Signer)
	if !ok || !pair.Leaf.IsCA {
		return fail("%s is not the certificate of an authority", corev1.TLSCertKey)
	}
	serverCA := o.ServerCA
	if len(serverCA) == 0 {
		serverCA = secret.Data[CAKey]
	}
	if len(bytes.TrimSpace(serverCA)) == 0 {
		serverCA = secret.Data[corev1.TLSCertKey]
	}
	if !x509.NewCertPool().AppendCertsFromPEM(serverCA) {
		return nil, nil, nil, errors.New("the authorities of the agent's certificate: there is no certificate in them")
	}
	chain, err := issuer.Chain(&pair)
	if err != nil {
		return fail("%s: %w", corev1.TLSCertKey, err)
	}
	return chain, signer, serverCA, nil
}

// Begin writes the onboarding to the Cluster's Spoke, which will record the use of the bootstrap
// certificate, and then to the Cluster. From then on, only the onboarding's certificates are
// accepted.
func (o *Onboarding) Begin(ctx context.Context, hub client.Client) error {
	err := spokes.Expect(ctx, hub, o.cluster, o.ID, func() error {
		_, err := unchanged(ctx, hub, o.cluster)
		return err
	})
	if err != nil {
		return fmt.Errorf("writing the onboarding on the Spoke %s: %w", client.ObjectKeyFromObject(o.cluster), err)
	}
	return setLabel(ctx, hub, o.cluster, o.ID)
}

// unchanged reads a Cluster again. It returns an error if it has another onboarding by now.
func unchanged(ctx context.Context, hub client.Client, cluster *clusterv1.Cluster) (*clusterv1.Cluster, error) {
	var present clusterv1.Cluster
	if err := hub.Get(ctx, client.ObjectKeyFromObject(cluster), &present); err != nil {
		return nil, err
	}
	if present.UID != cluster.UID || present.Labels[v1alpha1.OnboardingLabel] != cluster.Labels[v1alpha1.OnboardingLabel] {
		return nil, errors.New("another onboarding has begun meanwhile, or the Cluster was made again; repeat the command")
	}
	return &present, nil
}

// setLabel writes the label only if its value is unchanged: of two concurrent onboardings, the one
// whose secret is in the spoke might not be the one in force. It retries after other changes to the
// Cluster, whose status is written often while it is being created.
func setLabel(ctx context.Context, hub client.Client, cluster *clusterv1.Cluster, id string) error {
	err := retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		present, err := unchanged(ctx, hub, cluster)
		if err != nil {
			return err
		}
		changed := present.DeepCopy()
		metav1.SetMetaDataLabel(&changed.ObjectMeta, v1alpha1.OnboardingLabel, id)
		return hub.Patch(ctx, changed, client.MergeFromWithOptions(present, client.MergeFromWithOptimisticLock{}))
	})
	if err != nil {
		return fmt.Errorf("writing the onboarding on the Cluster %s: %w", client.ObjectKeyFromObject(cluster), err)
	}
	return nil
}

// Manifest returns the spoke's namespace and secret as YAML.
func (o *Onboarding) Manifest() ([]byte, error) {
	namespace, secret, err := o.manifests()
	return append(append(namespace, "---\n"...), secret...), err
}

func (o *Onboarding) manifests() (namespace, secret []byte, err error) {
	namespace, err = yaml.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Namespace", "metadata": map[string]any{"name": o.Secret.Namespace},
	})
	if err != nil {
		return nil, nil, fmt.Errorf("encoding the namespace: %w", err)
	}
	secret, err = yaml.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Secret", "type": o.Secret.Type, "data": o.Secret.Data,
		"metadata": map[string]any{"name": o.Secret.Name, "namespace": o.Secret.Namespace},
	})
	if err != nil {
		return nil, nil, fmt.Errorf("encoding the secret: %w", err)
	}
	return namespace, secret, nil
}

// Deliver writes the secret to the spoke, and creates its namespace if needed. A dry run only
// checks whether it could.
func (o *Onboarding) Deliver(ctx context.Context, spoke client.Client, dryRun bool) error {
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: o.Secret.Namespace}}
	switch err := spoke.Get(ctx, client.ObjectKeyFromObject(namespace), namespace); {
	case err == nil:
	case !apierrors.IsNotFound(err):
		return fmt.Errorf("reading the spoke's namespace %s: %w", namespace.Name, err)
	case dryRun:
		return create(ctx, spoke, namespace, true) // without the namespace, the secret cannot be tried
	default:
		if err := create(ctx, spoke, namespace, false); err != nil {
			return err
		}
	}
	present := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: o.Secret.Namespace, Name: o.Secret.Name}}
	var options []client.UpdateOption
	if dryRun {
		options = append(options, client.DryRunAll)
	}
	switch err := spoke.Get(ctx, client.ObjectKeyFromObject(present), present); {
	case apierrors.IsNotFound(err):
		return create(ctx, spoke, o.Secret.DeepCopy(), dryRun)
	case err != nil:
		return fmt.Errorf("reading the spoke's secret: %w", err)
	}
	present.Data = o.Secret.Data
	if err := spoke.Update(ctx, present, options...); err != nil {
		return fmt.Errorf("writing the spoke's secret %s: %w", client.ObjectKeyFromObject(present), err)
	}
	return nil
}

func create(ctx context.Context, c client.Client, object client.Object, dryRun bool) error {
	var options []client.CreateOption
	if dryRun {
		options = append(options, client.DryRunAll)
	}
	if err := c.Create(ctx, object, options...); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("creating %T %s: %w", object, client.ObjectKeyFromObject(object), err)
	}
	return nil
}

// resourceType is the type of secrets that a ClusterResourceSet applies.
const resourceType corev1.SecretType = "addons.cluster.x-k8s.io/resource-set"

// Dispatch makes Cluster API apply the secret, and its namespace, to the spoke as soon as the spoke
// has an API server. It creates ClusterResourceSets for this onboarding of this Cluster only.
// [Onboarding.Recall] must be called once the onboarding has begun.
func (o *Onboarding) Dispatch(ctx context.Context, hub client.Client, dryRun bool) error {
	namespace, secret, err := o.manifests()
	if err != nil {
		return err
	}
	name := fmt.Sprintf("%s-onboarding-%s", o.cluster.Name, o.ID[:8])
	// A secret of an earlier onboarding is replaced. A namespace that exists keeps its labels,
	// which the strategy Reconcile would take off.
	return errors.Join(
		o.dispatch(ctx, hub, name+"-namespace", "namespace.yaml", namespace, addonsv1.ClusterResourceSetStrategyApplyOnce, dryRun),
		o.dispatch(ctx, hub, name, "bootstrap.yaml", secret, addonsv1.ClusterResourceSetStrategyReconcile, dryRun),
	)
}

// dispatch creates a ClusterResourceSet that applies one manifest.
func (o *Onboarding) dispatch(
	ctx context.Context, hub client.Client, name, file string, manifest []byte, strategy addonsv1.ClusterResourceSetStrategy, dryRun bool,
) error {
	labels := map[string]string{v1alpha1.ClusterLabel: o.cluster.Name, v1alpha1.OnboardingLabel: o.ID}
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: o.cluster.Namespace, Name: name, Labels: labels},
		Type:       resourceType,
		Data:       map[string][]byte{file: manifest},
	}
	set := &addonsv1.ClusterResourceSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: o.cluster.Namespace, Name: name, Labels: labels},
		Spec: addonsv1.ClusterResourceSetSpec{
			// The label is set when the onboarding begins, and replaced when it ends.
			ClusterSelector: metav1.LabelSelector{MatchLabels: map[string]string{v1alpha1.OnboardingLabel: o.ID}},
			Resources:       []addonsv1.ResourceRef{{Name: name, Kind: string(addonsv1.SecretClusterResourceSetResourceKind)}},
			Strategy:        string(strategy),
		},
	}
	for _, object := range []client.Object{secret, set} {
		if err := controllerutil.SetOwnerReference(o.cluster, object, hub.Scheme()); err != nil {
			return fmt.Errorf("making the Cluster the owner of %T: %w", object, err)
		}
		if err := create(ctx, hub, object, dryRun); err != nil {
			return err
		}
	}
	return nil
}

// Recall deletes what earlier onboardings of the Cluster have dispatched.
func (o *Onboarding) Recall(ctx context.Context, hub client.Client) error {
	return recall(ctx, hub, o.cluster, o.ID)
}

// recall deletes what has been dispatched for a Cluster by all onboardings except one.
func recall(ctx context.Context, hub client.Client, cluster *clusterv1.Cluster, but string) error {
	var sets addonsv1.ClusterResourceSetList
	var secrets corev1.SecretList
	mine := []client.ListOption{
		client.InNamespace(cluster.Namespace), client.MatchingLabels{v1alpha1.ClusterLabel: cluster.Name}, client.HasLabels{v1alpha1.OnboardingLabel},
	}
	if err := hub.List(ctx, &sets, mine...); err != nil {
		return fmt.Errorf("listing ClusterResourceSets: %w", err)
	}
	if err := hub.List(ctx, &secrets, mine...); err != nil {
		return fmt.Errorf("listing secrets: %w", err)
	}
	var dispatched []client.Object
	for i := range sets.Items {
		dispatched = append(dispatched, &sets.Items[i])
	}
	for i := range secrets.Items {
		dispatched = append(dispatched, &secrets.Items[i])
	}
	for _, object := range dispatched {
		if object.GetLabels()[v1alpha1.OnboardingLabel] == but {
			continue
		}
		if err := hub.Delete(ctx, object); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("deleting %T %s: %w", object, client.ObjectKeyFromObject(object), err)
		}
	}
	return nil
}

// Offboard ends a Cluster's onboarding. From then on none of the Cluster's own certificates is
// accepted, whichever authority issued it. Its claims and Machines are not changed. Offboard
// reports whether the Cluster had not been offboarded before.
func Offboard(ctx context.Context, hub client.Client, name types.NamespacedName, dryRun bool) (bool, error) {
	var cluster clusterv1.Cluster
	if err := hub.Get(ctx, name, &cluster); apierrors.IsNotFound(err) {
		return false, fmt.Errorf("there is no Cluster %s in the hub; its certificates have ended with it", name)
	} else if err != nil {
		return false, fmt.Errorf("reading the Cluster %s: %w", name, err)
	}
	was := cluster.Labels[v1alpha1.OnboardingLabel] != v1alpha1.Offboarded
	if dryRun {
		return was, nil
	}
	if was {
		if err := setLabel(ctx, hub, &cluster, v1alpha1.Offboarded); err != nil {
			return was, err
		}
	}
	if err := recall(ctx, hub, &cluster, ""); err != nil {
		return was, err
	}
	spoke := &v1alpha1.Spoke{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name}}
	if err := hub.Delete(ctx, spoke); client.IgnoreNotFound(err) != nil {
		return was, fmt.Errorf("deleting the Spoke %s: %w", name, err)
	}
	return was, nil
}

// Remove removes all traces of onboarding from the served Clusters, and returns the number of
// Clusters that had any.
func Remove(ctx context.Context, hub client.Client, namespaces []string, serves func(cluster types.NamespacedName) bool) (removed int, err error) {
	if len(namespaces) == 0 {
		namespaces = []string{metav1.NamespaceAll}
	}
	for _, namespace := range namespaces {
		var clusters clusterv1.ClusterList
		if err := hub.List(ctx, &clusters, client.InNamespace(namespace), client.HasLabels{v1alpha1.OnboardingLabel}); err != nil {
			return removed, fmt.Errorf("listing Clusters: %w", err)
		}
		for i := range clusters.Items {
			cluster := &clusters.Items[i]
			if !serves(client.ObjectKeyFromObject(cluster)) {
				continue
			}
			if err := recall(ctx, hub, cluster, ""); err != nil {
				return removed, err
			}
			changed := cluster.DeepCopy()
			delete(changed.Labels, v1alpha1.OnboardingLabel)
			if err := hub.Patch(ctx, changed, client.MergeFrom(cluster)); client.IgnoreNotFound(err) != nil {
				return removed, fmt.Errorf("removing the onboarding from the Cluster %s: %w", client.ObjectKeyFromObject(cluster), err)
			}
			removed++
		}
	}
	return removed, nil
}
