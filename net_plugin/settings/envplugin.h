/* NCCL's variables as NCCL reads them: from an env plugin, if it has loaded one. */
#ifndef R2_SETTINGS_ENVPLUGIN_H
#define R2_SETTINGS_ENVPLUGIN_H

/* The variable's value, or NULL. Any thread; what it returns belongs to the environment or to the
 * plugin, and is to be copied soon. */
const char *r2_envplugin_get(const char *name);

#endif
